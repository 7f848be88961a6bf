"""`moaserve bench watching`: what recording metrics costs, and what extras that requests ask for cost beside it."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import httpx
from fastapi import FastAPI

from app.main import create_app
from app.metrics import Metrics
from app.recording import RequestRecorder
from app.settings import Settings
from benchmarks.offline import spread
from benchmarks.prompts import PromptError, read_lines
from speculative.async_engine import AsyncEngine
from speculative.config import EngineConfig
from speculative.request import Request, RequestOutput, RequestStats, SamplingParams

WITHOUT, RECORDING, EXTRA = "without", "recording", "recording, with extras"
SETTLING_S: Final = 0.05
REPLAYS: Final = 50


@dataclass(slots=True)
class WatchingResult:
    """Tokens per second and processor seconds per token of each round, by arm; processor seconds of recording and of a scrape.

    ``recorder_seconds`` are of one token; ``tokens_per_request`` of the requests that they were measured on. A round's processor
    seconds are the whole process': client, server and engine. Other programs on the machine disturb them less than its speed.
    """

    concurrency: int
    tokens_per_second: dict[str, list[float]] = field(default_factory=dict)
    cpu_seconds_per_token: dict[str, list[float]] = field(default_factory=dict)
    recorder_seconds: float = 0.0
    tokens_per_request: float = 0.0
    scrape_seconds: float = 0.0

    @property
    def num_rounds(self) -> int:
        """How many are whole."""
        return len(self.tokens_per_second.get(WITHOUT, ()))

    @property
    def recorder_share(self) -> float:
        """Of the processor time that a token takes altogether: what recording it takes."""
        return self.recorder_seconds / statistics.median(self.cpu_seconds_per_token[WITHOUT])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        pairs = {"recording/without": (RECORDING, WITHOUT), "extras/recording": (EXTRA, RECORDING)}
        return {
            "concurrency": self.concurrency,
            "tokens_per_second": {arm: [round(speed, 1) for speed in speeds] for arm, speeds in self.tokens_per_second.items()},
            "cpu_microseconds_per_token": {
                arm: [round(seconds * 1e6, 1) for seconds in each] for arm, each in self.cpu_seconds_per_token.items()
            },
            "speed_ratios": _ratios(self.tokens_per_second, pairs),
            "cpu_ratios": _ratios(self.cpu_seconds_per_token, pairs),
            "recorder_microseconds_per_token": round(self.recorder_seconds * 1e6, 3),
            "tokens_per_request": self.tokens_per_request,
            "recorder_share": round(self.recorder_share, 6),
            "scrape_milliseconds": round(self.scrape_seconds * 1e3, 2),
        }


def _ratios(figures: dict[str, list[float]], pairs: dict[str, tuple[str, str]]) -> dict[str, dict[str, float]]:
    """One arm's over another's, round by round: median and quartiles."""
    return {
        name: spread([a / b for a, b in zip(figures[arm], figures[over], strict=True)])
        for name, (arm, over) in pairs.items()
        if arm in figures
    }


def questions(path: Path, count: int, seed: int) -> list[str]:
    """``count`` first questions of a prompt file, drawn with ``seed``; raises PromptError."""
    rows = [row for _, row in read_lines(path)]
    asked = [text for row in rows if (text := _question(row))]
    if not asked:
        raise PromptError(f"{path} holds no question")
    return random.Random(seed).choices(asked, k=count)


def _question(row: dict[str, Any]) -> str | None:
    if "messages" in row:
        return next((message["content"] for message in row["messages"] if message["role"] == "user"), None)
    return row["turns"][0] if "turns" in row else row.get("prompt")


async def measure(
    config: EngineConfig,
    asked: Sequence[str],
    result: WatchingResult,
    *,
    rounds: int,
    max_tokens: int,
    extra: dict[str, Any] | None,
    progress: Callable[[], None],
) -> None:
    """Stream answers of exactly ``max_tokens`` to all questions, ``config.max_num_seqs`` at once, in each arm and round.

    One engine serves an application that records and one that does not, over HTTP without a network; the arms take turns at going
    first. ``extra`` is merged into the requests of a third arm. Raises EngineLoadError, and httpx.HTTPStatusError for extras that
    the server refuses. Whole rounds stand in ``result`` whatever happens.
    """
    engine = AsyncEngine.from_config(config)
    await engine.start()
    await engine.wait_ready()
    try:
        settings = Settings(max_num_seqs=config.max_num_seqs, max_queue_requests=None)
        recording, silent = create_app(settings, engine), create_app(settings, engine)
        silent.state.serving = replace(silent.state.serving, metrics=_Unwatched())
        arms: dict[str, tuple[FastAPI, dict[str, Any]]] = {WITHOUT: (silent, {}), RECORDING: (recording, {})}
        if extra is not None:
            arms[EXTRA] = (recording, extra)

        async def run(arm: str, texts: Sequence[str]) -> tuple[float, float]:
            app, more = arms[arm]
            async with _client(app) as client:
                return await _round(client, texts, config.max_num_seqs, _body(max_tokens) | more)

        for arm in arms:
            await run(arm, asked[: config.max_num_seqs])  # the first run of anything pays for what is set up
        # Before the rounds, which may be many: there is something to hold each of them against.
        series = [await _outputs(engine, text, max_tokens, number) for number, text in enumerate(asked[: config.max_num_seqs])]
        await asyncio.sleep(SETTLING_S)  # the engine's thread has nothing left to do: the time measured next is recording's
        tokens = sum(len(output.new_token_ids) for outputs in series for output in outputs)
        result.scrape_seconds = await _scrape_seconds(recording.state.serving.metrics)
        result.recorder_seconds, result.tokens_per_request = recorder_seconds(series) / tokens, tokens / len(series)
        for number in range(rounds):
            order = list(arms)
            round_ = {arm: await run(arm, asked) for arm in order[number % len(order) :] + order[: number % len(order)]}
            for arm in order:
                speed, spent = round_[arm]
                result.tokens_per_second.setdefault(arm, []).append(speed)
                result.cpu_seconds_per_token.setdefault(arm, []).append(spent)
            progress()
    finally:
        await engine.stop()


def recorder_seconds(series: Sequence[Sequence[RequestOutput]]) -> float:
    """Processor seconds that recording these requests takes: they are replayed, and the median of many replays is taken."""
    metrics, times = Metrics(), []
    for _ in range(REPLAYS):
        began = time.process_time()
        for outputs in series:
            recorder = metrics.request("replayed")
            for output in outputs:
                recorder.output(output)
            recorder.end()
        times.append(time.process_time() - began)
    return statistics.median(times)


async def _scrape_seconds(metrics: Metrics) -> float:
    times = []
    for _ in range(REPLAYS):
        began = time.process_time()
        await metrics.exposition("")
        times.append(time.process_time() - began)
    return statistics.median(times)


def _body(max_tokens: int) -> dict[str, Any]:
    return {
        "temperature": 0,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _round(client: httpx.AsyncClient, texts: Sequence[str], at_once: int, body: dict[str, Any]) -> tuple[float, float]:
    """Tokens per second, and processor seconds per token, from the first request to the last answer's end."""
    waiting = list(texts)
    tokens = 0

    async def worker() -> None:
        nonlocal tokens
        while waiting:
            message = {"role": "user", "content": waiting.pop()}
            response = await client.post("/v1/chat/completions", json=body | {"messages": [message]})
            if response.status_code != httpx.codes.OK:
                raise httpx.HTTPStatusError(response.text, request=response.request, response=response)
            usage = response.text.split("\n\n")[-3].removeprefix("data: ")  # the last event before [DONE]
            tokens += json.loads(usage)["usage"]["completion_tokens"]

    began, spent = time.perf_counter(), time.process_time()
    await asyncio.gather(*(worker() for _ in range(at_once)))
    return tokens / (time.perf_counter() - began), (time.process_time() - spent) / tokens


async def _outputs(engine: AsyncEngine, text: str, max_tokens: int, number: int) -> list[RequestOutput]:
    tokens = tuple(engine.tokenizer.encode(text))
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return [output async for output in engine.generate(Request(f"replayed-{number}", tokens, params))]


@asynccontextmanager
async def _client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://bench", timeout=None) as client:
        yield client


class _Unwatched(Metrics):
    def request(self, model_name: str) -> RequestRecorder:
        return _Nothing()


class _Nothing(RequestRecorder):
    def __init__(self) -> None:
        self.began, self.stats, self.finish_reason = 0.0, RequestStats(), "abort"

    def output(self, output: RequestOutput) -> None:
        pass

    def end(self) -> None:
        pass
