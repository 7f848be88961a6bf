"""An engine in memory that plays scripts: the seam at which HTTP is tested alone."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from speculative.config import EdgeStatus, EngineStatus, ModelInfo
from speculative.errors import ContextLengthError, EngineNotReadyError, InvalidBlockError, InvalidRequestError
from speculative.request import Grammar, Request, RequestOutput, RequestStats, TokenLogprob

CONTEXT = 100
INFO = ModelInfo(
    "tiny", CONTEXT, 256, "float32", "cpu", "moa", {"temperature": 0.7, "top_p": 0.95}, 1_700_000_000, memory={"kv_cache": 4096}
)
# Three verifications with a draft of 4 nodes each, in which 2, 0 and 1 draft tokens were accepted; 5 target calls with prefill.
STATS = {
    "num_drafts": 3,
    "num_draft_tokens": 12,
    "num_accepted_draft_tokens": 3,
    "num_target_calls": 5,
    "acceptance_histogram": (1, 1, 1),
}


class FakeTokenizer:
    """A character is a token, its code point the id."""

    chat_template = "present"
    eos_token: str | None = None

    def __init__(self) -> None:
        self.conversations: list[list[dict[str, Any]]] = []
        self.options: list[dict[str, Any]] = []
        self.init_kwargs: dict[str, Any] = {}
        self.backend_tokenizer = Tokenizer(WordLevel({chr(token): token for token in range(256)}))
        self.backend_tokenizer.decoder = decoders.Fuse()

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tokenize: bool,
        chat_template: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        assert chat_template is None and not tokenize
        self.options.append(options if tools is None else options | {"tools": tools})
        self.conversations.append(messages)
        if any(message["content"] == "break the template" for message in messages):
            raise ValueError("roles must alternate")
        return "".join(message["content"] for message in messages) + "\0"

    def encode(self, text: str, *, verbose: bool, add_special_tokens: bool) -> list[int]:
        text.encode()  # half a surrogate pair is not text, to real tokenizers neither
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


def outputs(
    request: Request, texts: Sequence[str], finish: str = "stop", tokens: int = 1, seconds: float = 0.5
) -> list[RequestOutput]:
    """One output per text, ``tokens`` tokens and ``seconds`` each; the last one finishes."""
    made = []
    params = request.params
    for step, text in enumerate(texts, 1):
        last = step == len(texts)
        stats = RequestStats(
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=step * tokens,
            cached_tokens=len(request.prompt_token_ids) - 1,
            arrival_time=10.0,
            scheduled_time=10.125,
            first_token_time=10.25,
            last_token_time=10.25 + seconds * (step - 1),
            num_accepted_prediction_tokens=min(step, len(request.prediction)),
            num_rejected_prediction_tokens=max(0, len(request.prediction) - step),
            **(STATS if last else {}),
        )
        output = RequestOutput(request.request_id, (7,) * tokens, text, finish if last else None, stats)
        if params.logprobs is not None:
            output = replace(output, logprobs=tuple(logprob(97 + step, params.logprobs) for _ in range(tokens)))
        if params.prompt_logprobs is not None and step == 1:
            scored = tuple(logprob(token, params.prompt_logprobs) for token in request.prompt_token_ids[1:])
            output = replace(output, prompt_logprobs=scored)
        made.append(output)
    return made


def logprob(token: int, count: int) -> TokenLogprob:
    """A made-up log-probability of a token, and of the ones that follow it in the alphabet."""
    return TokenLogprob(token, -token / 100, tuple((token + place, -token / 100 - place) for place in range(count)))


@dataclass
class FakeEngine:
    """Plays ``script`` for every request, or the request's entry of ``scripts``; hangs or raises after it if told to."""

    script: Sequence[str] = ("Hello", ",", " world")
    scripts: list[Sequence[str]] = field(default_factory=list)
    finish: str = "stop"
    hang: bool = False
    error: Exception | None = None
    ready: bool = True
    alive: bool = True
    busy_seconds: float = 0.0
    edge: EdgeStatus | None = None
    requests: list[Request] = field(default_factory=list)
    grammars: list[Grammar] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    blocks: dict[bytes, bytes] = field(default_factory=dict)
    hanging: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    @property
    def info(self) -> ModelInfo:
        if not self.ready:
            raise EngineNotReadyError("loading")
        return INFO

    async def start(self) -> None:
        self.calls.append("start")

    async def stop(self) -> None:
        self.calls.append("stop")

    def status(self) -> EngineStatus:
        return EngineStatus(2, 3, 0.25, 8, 9, 7, {"draft": 1.5, "verify": 2.5}, self.edge)

    def validate(self, request: Request) -> None:
        length = len(request.prompt_token_ids)
        if length + (request.params.max_tokens or 1) > CONTEXT:
            param = "prompt" if length >= CONTEXT else "max_tokens"
            raise ContextLengthError(f"the context holds {CONTEXT} tokens", param=param)

    def check_grammar(self, grammar: Grammar) -> None:
        self.grammars.append(grammar)
        if "refuse me" in grammar.source:
            raise InvalidRequestError("it cannot be followed", param="grammar")

    def known_blocks(self, keys: Sequence[bytes]) -> int:
        return next((place for place, key in enumerate(keys) if key not in self.blocks), len(keys))

    async def read_blocks(self, keys: Sequence[bytes], first: int) -> list[bytes]:
        return [self.blocks[key] for key in keys[first : self.known_blocks(keys)]]

    async def write_blocks(self, keys: Sequence[bytes], blocks: Sequence[bytes]) -> None:
        if b"garbage" in blocks:
            raise InvalidBlockError("not a block")
        self.blocks |= dict(zip(keys[-len(blocks) :], blocks, strict=True))

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        index = len(self.requests)
        self.requests.append(request)
        finished = False
        try:
            script = self.scripts[index] if self.scripts else self.script
            unfinished = self.hang or self.error is not None
            for output in outputs(request, [*script, ""] if unfinished else script, self.finish):
                if unfinished and output.finish_reason:
                    break
                await asyncio.sleep(0)  # as a real engine, give others their turn
                finished = output.finish_reason is not None
                yield output
            if self.error is not None:
                raise self.error
            if self.hang:
                self.hanging.release()
                await asyncio.Event().wait()
        finally:
            if not finished:
                self.aborted.append(request.request_id)


def events(response: httpx.Response) -> list[Any]:
    """The stream's data, parsed; the bytes must be nothing but data lines and [DONE] at the end."""
    *lines, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def chat_body(**extra: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], **extra}
