"""Streams of an edge whose server puts right what was written without it: what each kind of client ends up with."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import httpx
import pytest

from app.main import create_app
from app.settings import Settings
from speculative.request import Request, RequestOutput, RequestStats, TokenLogprob, Written
from tests.app.asking import URL, body_of, created, events_of
from tests.app.fakes import FakeEngine, chat_body, events
from tests.app.reassembly import reassembled

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROSE = "Berlin is the capital of Germany."
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {"zone": "CET"}}\n</tool_call>\nNow wait.'
)
CHAT_TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "clock")]
TOOLS = [{"type": "function", "name": name} for name in ("weather", "clock")]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


def logprob(token: int, alone: bool = False) -> TokenLogprob:
    return TokenLogprob(token, -9.0 if alone else -token / 100, ())


@dataclass
class CutOff(FakeEngine):
    """An edge's engine: of each answer, ``truth``, it tells the first ``at`` tokens (characters), then the drafter's ``alone``.

    The server is back after that, but where the answer ``ends_alone``, and verifies ``piece`` tokens at a time.
    """

    truth: str = ""
    at: int = 0
    alone: str = ""
    ends_alone: bool = False
    piece: int = 4

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        self.requests.append(request)
        told = list(self._outputs(request))
        if request.params.prompt_logprobs is not None:
            told[0] = replace(told[0], prompt_logprobs=tuple(logprob(token) for token in request.prompt_token_ids[1:]))
        for output in told[:-1]:
            yield output
        yield replace(told[-1], finish_reason="stop")

    def _outputs(self, request: Request) -> Iterator[RequestOutput]:
        def output(text: str, written: Written | None = None) -> RequestOutput:
            alone = written is not None and written.offline
            logprobs = None if request.params.logprobs is None else tuple(logprob(ord(each), alone) for each in text)
            tokens = tuple(map(ord, text))
            return RequestOutput(request.request_id, tokens, text, None, RequestStats(), logprobs, written=written)

        for character in self.truth[: self.at]:
            yield output(character)
        yield from (output(character, Written()) for character in self.alone)
        if self.ends_alone:
            return
        same = next((n for n, (a, b) in enumerate(zip(self.alone, self.truth[self.at :], strict=False)) if a != b), None)
        same = min(len(self.alone), len(self.truth) - self.at) if same is None else same
        yield from (output("") for _ in range(same // self.piece))
        place = self.at + same
        if same == len(self.alone):
            yield output(self.truth[place : place + 2])
        else:
            assert request.revisable
            yield output(self.truth[place : place + 2], Written(False, place, place))
        yield from (output(character) for character in self.truth[place + 2 :])
        yield output("")


@pytest.fixture
def engine() -> CutOff:
    engine = CutOff()
    engine.tokenizer.chat_template = "… <tool_call> …"
    return engine


@pytest.fixture
def app(engine: CutOff) -> Any:
    return create_app(Settings(), engine)


def minded(chunks: Sequence[dict[str, Any]]) -> tuple[str, list[Any]]:
    """Text and log-probabilities for a client that minds `edge.replace_from`."""
    text, logprobs = "", []
    for chunk in chunks:
        note = chunk.get("edge", {})
        if note.get("replace_from") is not None:
            text = text[: note["replace_from"]]
            del logprobs[note["replace_from_token"] :]
        for choice in chunk["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            told = choice["logprobs"] or {}
            if "tokens" in told:
                logprobs += zip(told["tokens"], told["token_logprobs"], told["text_offset"], strict=True)
            else:
                logprobs += [(each["token"], each["logprob"]) for each in told.get("content", ())]
    return text, logprobs


def cuts(truth: str) -> Iterator[tuple[int, str]]:
    """Where the server goes, and what the drafter writes then: nothing right, some, and all."""
    guesses = cycle(
        ("?!", '{"name": "clock", "arguments": {"a": 1}}', " is", "</tool_call>\nI see.", '<tool_call>\n{"name": "clock"')
    )
    for at in range(0, len(truth), 4):
        guess = next(guesses)
        yield at, guess
        yield at, truth[at : at + 9] + guess
    for at in range(0, len(truth), 7):
        yield at, truth[at : at + 11]


async def asked(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    return events(response)


async def test_text_with_log_probabilities_is_put_right(client: httpx.AsyncClient, engine: CutOff) -> None:
    engine.truth = PROSE
    for engine.at, engine.alone in cuts(PROSE):
        text, logprobs = minded(await asked(client, CHAT, chat_body(logprobs=True)))
        assert text == PROSE
        assert [token for token, _ in logprobs] == list(PROSE)
        # Those of tokens with which the server agrees are the drafter's.
        same = max(n for n in range(len(engine.alone) + 1) if PROSE[engine.at :].startswith(engine.alone[:n]))
        told = [value for _, value in logprobs]
        assert told[: engine.at] + told[engine.at + same :] == [
            -ord(each) / 100 for each in PROSE[: engine.at] + PROSE[engine.at + same :]
        ]


@pytest.mark.parametrize("echo", [False, True])
async def test_text_completions_are_put_right(client: httpx.AsyncClient, engine: CutOff, echo: bool) -> None:
    engine.truth, whole = PROSE, ("Once. " if echo else "") + PROSE
    for engine.at, engine.alone in cuts(PROSE):
        text, logprobs = minded(await asked(client, TEXT, {"prompt": "Once. ", "logprobs": 0, "echo": echo}))
        assert text == whole
        assert [(token, offset) for token, _, offset in logprobs] == [(each, place) for place, each in enumerate(whole)]


async def test_calls_are_told_once_they_are_verified(client: httpx.AsyncClient, engine: CutOff) -> None:
    engine.truth = CALLS
    engine.at = len(CALLS)
    whole = (await client.post(CHAT, json=chat_body(tools=CHAT_TOOLS))).json()["choices"][0]["message"]
    assert len(whole["tool_calls"]) == 2
    for engine.at, engine.alone in cuts(CALLS):
        chunks = await asked(client, CHAT, chat_body(tools=CHAT_TOOLS))
        assert minded(chunks)[0] == whole["content"]
        # No call has to be taken back: a client that knows nothing of edges makes the right ones.
        (choice,) = reassembled(chunks)["choices"]
        assert [call["function"] for call in choice["message"]["tool_calls"]] == [call["function"] for call in whole["tool_calls"]]
        assert choice["finish_reason"] == "tool_calls"
        assert not any("tool_calls" in chunk["choices"][0]["delta"] for chunk in chunks if chunk.get("edge", {}).get("offline"))
        silent = (await client.post(CHAT, json=chat_body(tools=CHAT_TOOLS))).json()["choices"][0]["message"]
        assert [call["function"] for call in silent["tool_calls"]] == [call["function"] for call in whole["tool_calls"]]
        assert silent["content"] == whole["content"]


async def test_a_call_that_nobody_verifies_is_told_at_the_end(client: httpx.AsyncClient, engine: CutOff) -> None:
    engine.truth, engine.at, engine.alone, engine.ends_alone = CALLS, 5, CALLS[5:], True
    chunks = await asked(client, CHAT, chat_body(tools=CHAT_TOOLS))
    (choice,) = reassembled(chunks)["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather", "clock"]
    (told,) = [chunk for chunk in chunks if chunk["choices"][0]["delta"].get("tool_calls")]
    assert told["edge"] == {"offline": True}


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_structured_output_is_never_taken_back(client: httpx.AsyncClient, engine: CutOff, path: str) -> None:
    engine.truth = truth = json.dumps({"city": "Rome", "country": "Italy"})
    body = {CHAT: chat_body(response_format=SCHEMA, logprobs=True), TEXT: {"prompt": "a", "guided_regex": ".*", "logprobs": 0}}[
        path
    ]
    for engine.at, engine.alone in cuts(truth):
        chunks = await asked(client, path, body)
        assert not any("edge" in chunk for chunk in chunks)
        text, logprobs = minded(chunks)
        assert text == truth and "".join(each[0] for each in logprobs) == truth
    engine.alone, engine.ends_alone = truth[engine.at :], True
    chunks = await asked(client, path, body)
    assert minded(chunks)[0] == truth and any(chunk.get("edge") == {"offline": True} for chunk in chunks)


def parts_of(told: Sequence[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Items for a client that adds deltas up and minds `edge.replace_from`, and log-probabilities likewise."""
    items: dict[int, str] = {}
    logprobs: list[Any] = []
    for event in told:
        if event["type"].endswith(".delta"):
            index, note = event["output_index"], event.get("edge", {})
            if note.get("replace_from") is not None:
                items[index] = items[index][: note["replace_from"]]
                del logprobs[note["replace_from_token"] :]
            items[index] = items.get(index, "") + event["delta"]
            logprobs += event.get("logprobs", [])
    return [items[index] for index in sorted(items)], logprobs


def said(output: Sequence[dict[str, Any]]) -> list[Any]:
    return [item["content"][0]["text"] if item["type"] == "message" else item["arguments"] for item in output]


@pytest.mark.parametrize("truth", [PROSE, CALLS])
async def test_responses_are_put_right(client: httpx.AsyncClient, engine: CutOff, truth: str) -> None:
    extra: dict[str, Any] = {"include": ["message.output_text.logprobs"]} if truth is PROSE else {"tools": TOOLS}
    engine.truth, engine.at = truth, len(truth)
    right = said((await created(client, **extra))["output"])
    for engine.at, engine.alone in cuts(truth):
        told = events_of(await client.post(URL, json=body_of(stream=True, **extra)))
        parts, logprobs = parts_of(told)
        assert parts == right
        assert said(told[-1]["response"]["output"]) == right, "so has a client that reads nothing but the end"
        done = [event for event in told if event["type"] in ("response.output_text.done", "response.function_call_arguments.done")]
        assert [event.get("text", event.get("arguments")) for event in done] == right
        if truth is PROSE:
            assert [each["token"] for each in logprobs] == list(PROSE)
            assert logprobs == told[-1]["response"]["output"][0]["content"][0]["logprobs"]
        alone = [event for event in told if event.get("edge", {}).get("offline")]
        assert all(event["type"] == "response.output_text.delta" for event in alone)
        assert said((await created(client, **extra))["output"]) == right


@pytest.mark.parametrize("path", [CHAT, TEXT, URL])
@pytest.mark.parametrize("ends_alone", [True, False])
async def test_the_end_says_whose_it_is(client: httpx.AsyncClient, engine: CutOff, path: str, ends_alone: bool) -> None:
    engine.truth, engine.at, engine.alone, engine.ends_alone = PROSE, 5, PROSE[5:9], ends_alone
    last: Any
    if path == URL:
        last = events_of(await client.post(URL, json=body_of(stream=True)))[-1]
        assert last["type"] == "response.completed"
    else:
        last = (await asked(client, path, chat_body() if path == CHAT else {"prompt": "a"}))[-1]
        assert last["choices"][0]["finish_reason"] == "stop"
    assert last.get("edge") == ({"offline": True} if ends_alone else None)


async def test_a_structured_response_is_never_taken_back(client: httpx.AsyncClient, engine: CutOff) -> None:
    engine.truth = truth = json.dumps({"city": "Rome"})
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}
    for engine.at, engine.alone in cuts(truth):
        told = events_of(await client.post(URL, json=body_of(stream=True, text=form)))
        assert not any("edge" in event for event in told) and parts_of(told)[0] == [truth]
