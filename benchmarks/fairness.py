"""`moaserve bench fairness`: how long streams wait for their next token while a long prompt is read beside them."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from transformers import PreTrainedTokenizerBase

from benchmarks.filling import fill
from benchmarks.network.processes import Cores, Process, moaserve, pinned, usable_cores
from benchmarks.prompts import Prompt
from benchmarks.turns import texts_of
from models.loader import read_json

ANSWER_TOKENS = 4
"""Of the long prompt's answer, whose first alone counts."""


@dataclass(slots=True)
class Stream:
    """When a stream's tokens came, those of one step together."""

    times: list[float] = field(default_factory=list)
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between tokens, of all gaps that were open at some time between ``begin`` and ``end``."""
        return [
            later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False) if later > begin and earlier < end
        ]


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """A stream's gaps in seconds: their median and the longest before the prompt came, and the longest while it was read."""

    median: float
    longest_before: float
    longest: float

    @property
    def ratio(self) -> float:
        """Of the longest gap while the prompt was read to the median of those before."""
        return self.longest / self.median

    @property
    def ratio_before(self) -> float:
        """The same of as long a time without the prompt: what the machine does by itself."""
        return self.longest_before / self.median


@dataclass(frozen=True, slots=True)
class Arrival:
    """A prompt of so many tokens came amid streams: seconds until its first token, amid them and with nothing beside it."""

    prompt_tokens: int
    first: float
    first_alone: float
    streams: tuple[StreamFigures, ...]

    @property
    def worst(self) -> StreamFigures:
        """The stream that was held up most, by its own median gap."""
        return max(self.streams, key=lambda stream: stream.ratio)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        each = [{"median": one.median, "longest_before": one.longest_before, "longest": one.longest} for one in self.streams]
        worst = {"ratio": self.worst.ratio, "ratio_before": max(one.ratio_before for one in self.streams)}
        return {"prompt_tokens": self.prompt_tokens, "first": self.first, "first_alone": self.first_alone, **worst, "streams": each}

    def line(self) -> str:
        """For people."""
        gap, longest = median(one.median for one in self.streams), self.worst.longest
        return (
            f"{self.prompt_tokens} tokens amid {len(self.streams)} streams: longest gap {longest * 1000:.1f} ms, "
            f"{self.worst.ratio:.2f}x its stream's median ({gap * 1000:.1f} ms over streams; "
            f"{max(one.ratio_before for one in self.streams):.2f}x without the prompt); first token after {self.first:.2f} s, "
            f"{self.first_alone:.2f} alone"
        )


def figures(streams: Sequence[Stream], settled: float, asked: float, answered: float) -> tuple[StreamFigures, ...]:
    """Of streams that had ``settled`` by then, amid which a prompt was ``asked`` and ``answered``."""
    told = []
    for stream in streams:
        before, meanwhile = stream.gaps(settled, asked)[:-1], stream.gaps(asked, answered)
        told.append(StreamFigures(median(before), max(before), max(meanwhile)))
    return tuple(told)


def with_longer_context(folder: Path, length: int, into: Path) -> Path:
    """A model that takes ``length`` tokens: itself, or a copy whose later positions nobody trained, which cost the same."""
    config = read_json(folder, "config.json")
    if config["max_position_embeddings"] >= length:
        return folder
    copy = into / folder.name
    shutil.copytree(folder, copy)
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": length}), encoding="utf-8")
    return copy


async def measure(
    options: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    num_streams: int,
    prompt_tokens: int,
    repeats: int,
    settling: float,
    stream_tokens: int,
    progress: Callable[[], None],
) -> list[Arrival]:
    """Start a server with ``options`` and let prompts come amid its streams, once they have run for ``settling`` seconds.

    The first of ``repeats`` + 1 arrivals is left out: what is met for the first time takes longer.
    """
    cores = Cores.split(usable_cores())
    # Its threads go where there is room, as they do for whoever starts it: one core would have both the engine and the event loop.
    server = await Process.start(moaserve("serve", "--port", "0", *options), None)
    arrivals = []
    try:
        with pinned(cores.client if cores else None):
            async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=httpx.Limits(max_connections=None)) as client:
                await fill(client, num_streams + 1, prompt_tokens // 2)
                for number, text in enumerate(texts_of(tokenizer, prompts, repeats + 1, prompt_tokens)):
                    begun = [prompts[(number * num_streams + place) % len(prompts)] for place in range(num_streams)]
                    arrivals.append(await _arrival(client, text, f"{number}", begun, settling, stream_tokens))
                    progress()
    finally:
        await server.stop()
    return arrivals[1:]


async def _arrival(
    client: httpx.AsyncClient, text: str, salt: str, begun: Sequence[Prompt], settling: float, stream_tokens: int
) -> Arrival:
    """Let ``text`` come once alone and once amid streams of the prompts ``begun``."""
    alone, _ = await _first_token(client, text, f"alone-{salt}")
    streams = [Stream() for _ in begun]
    tasks = [
        asyncio.create_task(_follow(client, stream, prompt, stream_tokens, seed))
        for seed, (stream, prompt) in enumerate(zip(streams, begun, strict=True))
    ]
    try:
        await _all_move(streams, tasks)
        # As long before as the prompt is likely to be read for, so that the two are alike.
        settled = time.perf_counter() + settling
        await asyncio.sleep(settling + max(settling, 2 * alone))
        asked = time.perf_counter()
        seconds, tokens = await _first_token(client, text, f"amid-{salt}")
        await _all_move(streams, tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Arrival(tokens, seconds, alone, figures(streams, settled, asked, asked + seconds))


async def _all_move(streams: Sequence[Stream], tasks: Sequence[asyncio.Task[None]]) -> None:
    """Until each stream has gone on; raises what ended one of them before."""
    for stream in streams:
        stream.moved.clear()

    async def all_move() -> None:
        for stream in streams:
            await stream.moved.wait()

    moving = asyncio.create_task(all_move())
    done, _ = await asyncio.wait([moving, *tasks], return_when=asyncio.FIRST_COMPLETED)
    if moving not in done:
        moving.cancel()
        for task in done:
            await task
        raise StreamEndedError


class StreamEndedError(Exception):
    """A stream ended before the prompt had been read."""


async def _follow(client: httpx.AsyncClient, stream: Stream, prompt: Prompt, tokens: int, seed: int) -> None:
    # With origins each token is told at once: without, one whose bytes are not yet a character waits for the next.
    told = _said(client, list(prompt.token_ids), max_tokens=tokens, seed=seed, return_token_origins=True)
    async with aclosing(told) as pieces:
        async for _ in pieces:
            stream.times.append(time.perf_counter())
            stream.moved.set()


async def _first_token(client: httpx.AsyncClient, text: str, salt: str) -> tuple[float, int]:
    """Seconds until a prompt's first token, and the prompt's length."""
    began, first, tokens = time.perf_counter(), 0.0, 0
    async for chunk in _said(client, text, max_tokens=ANSWER_TOKENS, cache_salt=salt, stream_options={"include_usage": True}):
        first = first or time.perf_counter() - began
        tokens = (chunk.get("usage") or {}).get("prompt_tokens", tokens)
    return first, tokens


async def _said(client: httpx.AsyncClient, prompt: str | list[int], **parameters: Any) -> AsyncGenerator[dict[str, Any], None]:
    body = {"prompt": prompt, "stream": True, "temperature": 1, "ignore_eos": True, **parameters}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.is_error:
            await response.aread()
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))
