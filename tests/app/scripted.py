"""An engine without a network that writes given tokens, for a real AsyncEngine: its threads, failures and step sizes."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from app.main import create_app
from app.settings import Settings
from models.loader import BUNDLED, load_tokenizer
from speculative.async_engine import AsyncEngine
from speculative.config import EngineStatus, ModelInfo
from speculative.detokenizer import Detokenizer
from speculative.errors import InvalidRequestError
from speculative.prefixes import Prefixes
from speculative.request import Grammar, Request, RequestOutput, TokenLogprob
from speculative.sampler import Sampler
from speculative.sequence import Sequence as Running
from speculative.timing import StepClock

TOKENIZER: Any = load_tokenizer(BUNDLED["target"])
EOS = TOKENIZER.eos_token_id
CONTEXT = 1000


class ScriptedEngine:
    """Writes ``answers`` in the order of the requests, the last one again and again, ``tokens_per_step`` tokens a step.

    ``before_step`` may raise, or hold the step up.
    """

    tokenizer = TOKENIZER
    info = ModelInfo("tiny", CONTEXT, len(TOKENIZER), "float32", "cpu", "none", {}, 1_700_000_000)

    def __init__(
        self,
        answers: Sequence[Sequence[int]],
        tokens_per_step: int = 1,
        slots: int = 4,
        before_step: Callable[[ScriptedEngine], None] = lambda _: None,
    ) -> None:
        self._answers = deque(map(list, answers))
        self._left: dict[str, deque[int]] = {}
        self._tokens_per_step, self._slots, self._before_step = tokens_per_step, slots, before_step
        self.running: list[Running] = []
        self.waiting: deque[Running] = deque()
        self.prefixes = Prefixes((), 0, None)
        self.clock = StepClock()
        self.before_pass: Callable[[], None] = lambda: None
        self.lost: str | None = None
        self.closed = False

    def when_lost(self, call: Callable[[], None]) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def validate(self, request: Request) -> None:
        assert len(request.prompt_token_ids) < CONTEXT

    def check_grammar(self, grammar: Grammar) -> None:
        raise InvalidRequestError("a script follows no grammar", param="grammar")

    def add(self, request: Request) -> None:
        params, prompt = request.params, request.prompt_token_ids
        self._left[request.request_id] = deque(self._answers.popleft() if len(self._answers) > 1 else self._answers[0])
        self.waiting.append(
            Running(
                request,
                Sampler(params, 0, prompt, {EOS}),
                CONTEXT if params.max_tokens is None else len(prompt) + params.max_tokens,
                Detokenizer(TOKENIZER._tokenizer, params.stop, params.min_tokens, before=prompt if request.continues else ()),
                list(prompt),
            )
        )

    def abort(self, request_id: str) -> RequestOutput | None:
        found = [each for each in (*self.running, *self.waiting) if each.request.request_id == request_id]
        return self._ended(found[0], "abort") if found else None

    def fail_active(self) -> list[RequestOutput]:
        return [self._ended(each, "error") for each in list(self.running)]

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def status(self) -> EngineStatus:
        return EngineStatus(len(self.running), len(self.waiting), len(self.running) / self._slots)

    def step(self) -> list[RequestOutput]:
        while self.waiting and len(self.running) < self._slots:
            self.running.append(self.waiting.popleft())
        self.clock.begin()
        self.before_pass()
        self._before_step(self)
        outputs = []
        for each in list(self.running):
            left = self._left[each.request.request_id]
            tokens = tuple(left.popleft() if left else EOS for _ in range(self._tokens_per_step))
            count = each.request.params.logprobs
            told = None if count is None else [_logprob(token, count) for token in tokens]
            each.num_target_calls += 1
            outputs.append(each.append(tokens, len(tokens) - 1, told, frozenset({EOS})))
            if each.finish_reason is not None:
                self.running.remove(each)
        self.clock.end("verify")
        return outputs

    def _ended(self, sequence: Running, reason: Any) -> RequestOutput:
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        return sequence.finish(reason)


def _logprob(token: int, count: int) -> TokenLogprob:
    """A made-up log-probability of a token, and of ``count`` tokens that could have stood there."""
    return TokenLogprob(token, -token / 1000, tuple((token + place, -(token + place) / 1000) for place in range(count)))


def tokens_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return ids


@asynccontextmanager
async def served(scripted: ScriptedEngine, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, AsyncEngine]]:
    """The application over it, as a client meets it, and its engine thread."""
    engine = AsyncEngine(lambda: scripted)  # type: ignore[arg-type, return-value]
    app = create_app(Settings(**settings), engine)
    async with app.router.lifespan_context(app):
        await engine.wait_ready()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield client, engine
