"""`moaserve bench gateway`: what HTTP, server-sent events and JSON cost beside an engine, and what holds the event loop up."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from typing import Any, Final

import uvicorn

from app import chat
from app.commands.serving import uvicorn_options
from app.main import create_app
from app.messages import Message, TemplateOptions
from app.settings import Settings
from benchmarks.loop_watch import Block, LoopWatch
from benchmarks.offline import spread
from speculative.async_engine import AsyncEngine
from speculative.config import EngineConfig
from speculative.request import Request, SamplingParams

DIRECT, HTTP = "direct", "http"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
POSTS: Final = 3
MEGABYTE: Final = 1_000_000


class GatewayError(Exception):
    """A measurement that could not be taken, in words."""


@dataclass(frozen=True, slots=True)
class Round:
    """One arm's round: tokens per second, and processor seconds per token of the event loop's thread and of the whole process."""

    tokens_per_second: float
    loop_seconds: float
    cpu_seconds: float

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {
            "tokens_per_second": round(self.tokens_per_second, 1),
            "loop_microseconds_per_token": round(self.loop_seconds * 1e6, 1),
            "cpu_microseconds_per_token": round(self.cpu_seconds * 1e6, 1),
        }


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What is posted amid streams: a path and bodies, one after the other; none for GET."""

    path: str
    bodies: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Disturbed:
    """What came of it: the loop's longest block, how many were above 20 ms, the streams' longest silence, and statuses."""

    block: Block
    over: int
    longest_silence: float
    statuses: list[int]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "longest_block": self.block.as_dict(),
            "blocks_over_20_ms": self.over,
            "longest_silence_milliseconds": round(self.longest_silence * 1e3, 1),
            "statuses": self.statuses,
        }


@dataclass(slots=True)
class GatewayResult:
    """Rounds by concurrency and arm, and what disturbances did to as many streams as the most at once."""

    rounds: dict[int, dict[str, list[Round]]] = field(default_factory=dict)
    disturbed: dict[str, Disturbed] = field(default_factory=dict)

    def cost(self, concurrency: int) -> dict[str, float]:
        """The share of tokens per second that the gateway takes: median and quartiles over rounds."""
        arms = self.rounds[concurrency]
        pairs = zip(arms[HTTP], arms[DIRECT], strict=True)
        return spread([1 - http.tokens_per_second / direct.tokens_per_second for http, direct in pairs])

    def loop_seconds(self, concurrency: int) -> float:
        """Processor seconds of the event loop per token over HTTP: the median of rounds."""
        return spread([each.loop_seconds * 1e6 for each in self.rounds[concurrency][HTTP]])["median"] / 1e6

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "concurrency": {
                str(concurrency): {
                    "cost": self.cost(concurrency),
                    **{arm: [each.as_dict() for each in rounds] for arm, rounds in arms.items()},
                }
                for concurrency, arms in self.rounds.items()
            },
            "disturbed": {name: each.as_dict() for name, each in self.disturbed.items()},
        }


def measure(
    engine: AsyncEngine,
    config: EngineConfig,
    asked: Sequence[str],
    result: GatewayResult,
    *,
    concurrencies: Sequence[int],
    rounds: int,
    max_tokens: int,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Answer all questions over HTTP and by the engine alone, in turn; then post what is large amid streams.

    The server is uvicorn as `moaserve serve` runs it, its client another process. Raises EngineLoadError, GatewayError and
    KeyboardInterrupt. Whole rounds stand in ``result`` whatever happens.
    """
    settings = Settings(max_num_seqs=config.max_num_seqs, max_queue_requests=None)
    listener = socket.create_server(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]

    async def work() -> None:
        await engine.wait_ready()
        async with _client() as ask, _client() as disturb:
            bench = _Bench(engine, port, [_body(text, max_tokens) for text in asked], ask, disturb, result)
            for concurrency in concurrencies:
                await bench.rounds(concurrency, rounds, progress)
            for name, disturbance in disturbances(engine, asked, max_tokens).items():
                await bench.disturbed(name, disturbance, max(concurrencies))

    server = _Measured(uvicorn.Config(create_app(settings, engine), **uvicorn_options(settings)), work)
    with listener:
        server.run(sockets=[listener])
    if server.failure is not None:
        raise server.failure
    if not server.done:
        raise KeyboardInterrupt  # as the server raises it itself, except where its process was started with the signal ignored


class _Measured(uvicorn.Server):
    """Does its work beside what it serves, on the same loop, and ends."""

    def __init__(self, config: uvicorn.Config, work: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self._work = work
        self.done = False
        self.failure: Exception | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._task = asyncio.create_task(self._measure())

    async def _measure(self) -> None:
        try:
            await self._work()
            self.done = True
        except Exception as error:
            self.failure = error
        self.should_exit = True


Ask = Callable[[bytes], Awaitable[dict[str, Any]]]


@asynccontextmanager
async def _client() -> AsyncIterator[Ask]:
    """What asks a client process and returns what it says."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "benchmarks.gateway_client", stdin=pipe, stdout=pipe)
    assert process.stdin is not None and process.stdout is not None
    to, told = process.stdin, process.stdout

    async def ask(job: bytes) -> dict[str, Any]:
        to.write(job + b"\n")
        result: dict[str, Any] = json.loads(await told.readline() or b'{"error": "the client process has ended"}')
        if "error" in result:
            raise GatewayError(result["error"])
        return result

    try:
        yield ask
    finally:
        to.close()
        await process.wait()


class _Bench:
    def __init__(
        self, engine: AsyncEngine, port: int, bodies: list[dict[str, Any]], ask: Ask, disturb: Ask, result: GatewayResult
    ) -> None:
        self._engine, self._port, self._bodies, self._ask, self._disturb = engine, port, bodies, ask, disturb
        self._numbers = count()
        self.result = result

    async def rounds(self, concurrency: int, rounds: int, progress: Callable[[], None]) -> None:
        arms = {DIRECT: self._direct, HTTP: self._http}
        for arm in arms.values():
            await arm(concurrency)  # the first run of anything pays for what is set up
        for number in range(rounds):
            round_ = {name: await _round(arms[name], concurrency) for name in list(arms)[:: 1 if number % 2 else -1]}
            figures = self.result.rounds.setdefault(concurrency, {name: [] for name in arms})
            for name, each in round_.items():
                figures[name].append(each)
            progress()

    async def disturbed(self, name: str, disturbance: Disturbance, concurrency: int) -> None:
        """Stream as much as a round does, and post amid that."""
        posts = json.dumps({"port": self._port, "path": disturbance.path, "posts": disturbance.bodies}).encode()
        with LoopWatch() as watch:
            streams, answers = await asyncio.gather(self._ask(self._streaming(concurrency)), self._disturb(posts))
            self.result.disturbed[name] = Disturbed(watch.longest, watch.over, streams["longest_silence"], answers["statuses"])

    async def _http(self, concurrency: int) -> int:
        return int((await self._ask(self._streaming(concurrency)))["tokens"])

    def _streaming(self, concurrency: int) -> bytes:
        return json.dumps({"port": self._port, "path": CHAT, "bodies": self._bodies, "concurrency": concurrency}).encode()

    async def _direct(self, concurrency: int) -> int:
        requests = self._requests()
        tokens = 0

        async def worker() -> None:
            nonlocal tokens
            for request in requests:
                async with aclosing(self._engine.generate(request)) as outputs:
                    async for output in outputs:
                        tokens += len(output.new_token_ids)

        await asyncio.gather(*(worker() for _ in range(concurrency)))
        return tokens

    def _requests(self) -> Iterator[Request]:
        """The same as the server makes of the bodies, tokenized one after the other as they are begun."""
        for body in self._bodies:
            messages = [Message.model_validate(message) for message in body["messages"]]
            prompt = chat.prompt_tokens(self._engine.tokenizer, messages, TemplateOptions())
            params = SamplingParams(max_tokens=body["max_tokens"], temperature=0.0, ignore_eos=True)
            yield Request(f"direct-{next(self._numbers)}", tuple(prompt), params, revisable=True, adaptive=True)


async def _round(arm: Callable[[int], Awaitable[int]], concurrency: int) -> Round:
    began, loop, process = time.perf_counter(), time.thread_time(), time.process_time()
    tokens = await arm(concurrency)
    seconds = time.perf_counter() - began
    return Round(tokens / seconds, (time.thread_time() - loop) / tokens, (time.process_time() - process) / tokens)


def _body(text: str, max_tokens: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def disturbances(engine: AsyncEngine, asked: Sequence[str], max_tokens: int) -> dict[str, Disturbance]:
    """What is posted amid streams: requests that are large in one way or another, some of which are refused."""
    tokenizer, most = engine.tokenizer, engine.info.max_model_len
    sentences = " ".join(asked) + " "
    tokens = tokenizer.encode(sentences, add_special_tokens=False)
    longest = list(islice(cycle(tokens), most - 64))
    prompts = [list(islice(cycle(tokens), number, number + most - 64)) for number in range(POSTS)]  # none begins as another does
    megabyte = (sentences * (MEGABYTE // len(sentences) + 1))[:MEGABYTE]
    message = {"role": "user", "content": "Hello!"}
    properties = {f"property_{number}": {"type": "string", "maxLength": 10 + number} for number in range(50)}
    schemas = [{"type": "object", "properties": {**properties, f"own_{number}": {"type": "integer"}}} for number in range(POSTS)]
    short: dict[str, Any] = {"max_tokens": 1}

    def chats(*messages: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"messages": list(messages), **short}] * POSTS

    return {
        "nothing": Disturbance("/health", [{}]),
        f"a prompt of {most - 64} tokens": Disturbance(TEXT, [{"prompt": tokenizer.decode(ids)} | short for ids in prompts]),
        "a text of 1 MB": Disturbance(CHAT, chats({"role": "user", "content": megabyte})),
        "200,000 token ids": Disturbance(TEXT, [{"prompt": list(islice(cycle(tokens), 200_000))} | short] * POSTS),
        "30,000 messages": Disturbance(CHAT, chats(*[message] * 30_000)),
        "64 prompts": Disturbance(
            TEXT, [{"prompt": [f"{number} {text}" for number, text in enumerate(islice(cycle(asked), 64))]} | short]
        ),
        "a prompt's log-probabilities": Disturbance(
            TEXT, [{"prompt": longest, "echo": True, "logprobs": 5, "max_tokens": 0}] * POSTS
        ),
        "a JSON schema": Disturbance(
            CHAT, [{"messages": [message], "structured_outputs": {"json": each}} | short for each in schemas]
        ),
        "the API's description": Disturbance("/openapi.json", [{}] * POSTS),
        "a scrape": Disturbance("/metrics", [{}] * 10),
    }
