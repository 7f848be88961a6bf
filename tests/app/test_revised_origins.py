"""Whose each token is, on an edge whose server puts right what was written without it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from app.main import create_app
from app.settings import Settings
from speculative.common_prefix import common_prefix
from speculative.detokenizer import Detokenizer
from speculative.edge.published import Published
from speculative.edge.session import Gain
from speculative.remote.frames import Stats
from speculative.request import Request, RequestOutput, RequestStats, Written
from tests.app.fakes import FakeEngine, events
from tests.app.reassembly import revised_tokens
from tests.app.scripted import EOS, TOKENIZER, tokens_of
from tests.app.test_origins import content
from tests.app.test_replay import CHAT, CODE, MANY_BYTES, TEXT, WORDS, chat, text

ASKED = {"return_token_origins": True, "max_tokens": 60}
PIECE = 3
"""How many draft tokens the server verifies at a time."""


@dataclass
class CutOff(FakeEngine):
    """An edge's engine: its server tells the ``truth``'s first ``at`` tokens, then its drafter writes ``alone``, then they meet."""

    tokenizer: Any = field(default_factory=lambda: TOKENIZER)
    truth: Sequence[int] = ()
    at: int = -1
    alone: Sequence[int] = ()

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        self.requests.append(request)
        published, server, place = Published(), self._detokenizer(request), 0
        while True:
            if place == self.at:
                for output in self._alone(request):
                    published.write_alone(output)
                    yield output
            drafts = published.ahead or self.truth[place : min(place + PIECE, self.at if place < self.at else len(self.truth))]
            accepted = next((n for n, token in enumerate(drafts[:PIECE]) if token != self.truth[place + n]), len(drafts[:PIECE]))
            if place < self.at:
                accepted = min(accepted, self.at - place - 1)
            tokens = tuple(self.truth[place : place + accepted + 1])
            told, ends = "", False
            for count, token in enumerate(tokens, 1):
                told += server.flush() if token == EOS else server.add(token)
                if ends := token == EOS or server.stopped:
                    tokens = tokens[:count]
                    break
            place += len(tokens)
            gain = Gain(tokens, accepted, 0, told, "stop" if ends else None, None, None, Stats(0.0, 1, 0, 0, 0))
            news = published.take(gain, place, revise=request.revisable)
            assert news is not None
            drafted = max(0, accepted - len(tokens) + len(news.tokens))
            yield RequestOutput(
                request.request_id, news.tokens, news.text, gain.finish_reason, RequestStats(), num_accepted=drafted,
                written=news.written,
            )  # fmt: skip
            if ends:
                return

    def _alone(self, request: Request) -> Iterator[RequestOutput]:
        detokenizer = self._detokenizer(request)
        for token in self.truth[: self.at]:
            detokenizer.add(token)
        for token in self.alone:
            told = detokenizer.add(token)
            assert not detokenizer.stopped
            yield RequestOutput(request.request_id, (token,), told, None, RequestStats(), num_accepted=1, written=Written())

    def _detokenizer(self, request: Request) -> Detokenizer:
        return Detokenizer(TOKENIZER.backend_tokenizer, request.params.stop)


@pytest.fixture
def engine() -> CutOff:
    return CutOff()


@pytest.fixture
def app(engine: CutOff) -> Any:
    return create_app(Settings(), engine)


def guesses(truth: Sequence[int], at: int) -> Iterator[list[int]]:
    """What a drafter may write: what begins like the text but in other tokens, right tokens and wrong ones, half characters."""
    left, emoji = truth[at:-1], tokens_of("🙂")
    yield [token for character in TOKENIZER.decode(left)[:6] for token in tokens_of(character)]
    yield [*left[:4], *tokens_of(" 漢 no")]
    yield emoji[:2]
    yield [*left[:2], *emoji[:-1]]
    yield left[:5]


async def asked(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], str, list[Any]]:
    """The whole answer's tokens and text, and the stream's chunks."""
    whole = (await client.post(path, json={**body, **ASKED})).json()["choices"][0]
    chunks = events(await client.post(path, json={**body, **ASKED, "stream": True}))
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    return whole["token_origins"], content(whole), chunks


CASES = {
    "chat": (CHAT, chat(), WORDS),
    "characters of several tokens": (CHAT, chat(), MANY_BYTES),
    "a completion": (TEXT, text(), CODE),
    "an echo": (TEXT, text(prompt="Hi there", echo=True), MANY_BYTES),
    "what only begins like a stop string": (CHAT, chat(stop=[" tables of", "Good day", "please.."]), WORDS),
    "a stop string": (CHAT, chat(stop=["five, p"]), WORDS),
}


@pytest.mark.parametrize("name", CASES)
async def test_origins_follow_what_is_put_right(client: httpx.AsyncClient, engine: CutOff, name: str) -> None:
    path, body, written = CASES[name]
    echoed = body["prompt"] if body.get("echo") else ""
    engine.truth = truth = [*tokens_of(written), EOS]
    never_cut, right, _ = await asked(client, path, body)
    revisions = 0
    for at, alone in ((place, guess) for place in range(len(truth)) for guess in guesses(truth, place)):
        if any(stop in TOKENIZER.decode([*truth[:at], *alone]) for stop in body.get("stop", ())):
            continue  # it would have ended
        engine.at, engine.alone = at, alone
        whole, told, chunks = await asked(client, path, body)
        assert revised_tokens(chunks, echoed, len(tokens_of(echoed))) == whole
        assert told == right
        assert [token["text"] for token in whole] == [token["text"] for token in never_cut]
        kept = whole[at : at + common_prefix(alone, truth[at:])]
        assert {token["origin"] for token in kept} <= {"draft"}, "the server agrees with what was drafted"
        revisions += any("replace_from" in chunk.get("edge", {}) for chunk in chunks)
    assert revisions > len(truth)


async def test_a_token_before_the_correction_is_told_again_with_its_text(client: httpx.AsyncClient, engine: CutOff) -> None:
    engine.truth, engine.at, engine.alone = [*tokens_of("Two tables for five"), EOS], 1, tokens_of(" tables of")
    _, _, chunks = await asked(client, CHAT, chat(stop=" tables for six"))
    told = [chunk for chunk in chunks if chunk["choices"][0].get("token_origins")]
    (correction,) = [chunk for chunk in told if "replace_from" in chunk.get("edge", {})]
    assert correction["edge"] == {"offline": False, "replace_from": 3, "replace_from_token": 2}
    assert correction["choices"][0]["token_origins"] == [{"index": 2, "text": "", "origin": "target"}]
    assert told[-1]["choices"][0]["token_origins"][:2] == [
        {"index": 1, "text": " tables", "origin": "draft"},
        {"index": 2, "text": " for", "origin": "target"},
    ]
