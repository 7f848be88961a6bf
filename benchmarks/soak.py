"""`moaserve bench soak`: whether a server's memory grows with the requests that it has answered."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import linear_regression, mean, median
from typing import Any

import httpx

from benchmarks.filling import fill
from benchmarks.network.processes import Process, moaserve

FEW = 12
"""Tokens of most answers: it is requests that count."""

_WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: where it goes, its body, what it must be answered with, and after how many lines of a stream the client leaves."""

    kind: str
    path: str
    body: dict[str, Any]
    status: int = 200
    leaves_after: int | None = None


@dataclass(frozen=True, slots=True)
class SoakResult:
    """Requests by kind, seconds in all, and bytes of the server's memory after so many requests."""

    kinds: dict[str, int]
    seconds: float
    memory: tuple[tuple[int, int], ...]

    @property
    def growth(self) -> float:
        """Bytes by which the last quarter's samples exceed those of the second, in the median: by then caches are full."""
        sizes = [size for _, size in self.memory]
        quarter = max(1, len(sizes) // 4)
        return median(sizes[-quarter:]) - median(sizes[quarter : 2 * quarter])

    @property
    def slope(self) -> float:
        """Bytes for each request, by a straight line through the last half."""
        later = self.memory[len(self.memory) // 2 :]
        return linear_regression([count for count, _ in later], [size for _, size in later]).slope

    @property
    def peak(self) -> int:
        """The most that was seen."""
        return max(size for _, size in self.memory)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        figures = {"growth": self.growth, "slope": self.slope, "peak": self.peak, "mean": mean(size for _, size in self.memory)}
        return {"requests": self.kinds, "seconds": self.seconds, **figures, "memory": [list(sample) for sample in self.memory]}

    def line(self) -> str:
        """For people."""
        count = sum(self.kinds.values())
        first, peak, last = (size / 2**20 for size in (self.memory[0][1], self.peak, self.memory[-1][1]))
        return (
            f"{count} requests in {self.seconds:.0f} s ({count / self.seconds:.1f} per second): memory {first:.1f} MiB at first, "
            f"{peak:.1f} at most, {last:.1f} at last; the last quarter {self.growth / 2**20:+.1f} MiB against the second, "
            f"{self.slope * 1000 / 2**10:+.1f} KiB per 1,000 requests in the last half"
        )


def asked(number: int, texts: Sequence[str]) -> Ask:
    """The request of this number: kinds take turns, and no two say the same."""
    said = [{"role": "user", "content": f"{number}. {texts[number * 7 % len(texts)]}"}]
    few = {"max_tokens": FEW, "seed": number}
    chat: dict[str, Any] = {"messages": said, **few}
    properties = {f"name_{number}_{place}": {"type": "string", "maxLength": 8} for place in range(1 + number % 3)}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    tool = {"type": "function", "function": {"name": f"weather_{number % 50}", "parameters": _WEATHER}}
    kinds = (
        Ask("chat, streamed", "/v1/chat/completions", chat | {"stream": True, "temperature": 1}),
        Ask("chat", "/v1/chat/completions", chat | {"temperature": 0}),
        Ask("completion", "/v1/completions", {"prompt": said[0]["content"], "n": 2, **few}),
        Ask("log-probabilities", "/v1/chat/completions", chat | {"logprobs": True, "top_logprobs": 3}),
        Ask("tools", "/v1/chat/completions", chat | {"tools": [tool], "tool_choice": "required"}),
        Ask(
            "structured",
            "/v1/chat/completions",
            chat | {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}},
        ),
        Ask("client leaves", "/v1/chat/completions", chat | {"stream": True, "max_tokens": 400}, leaves_after=6),
        Ask("response, kept", "/v1/responses", {"input": said[0]["content"], "max_output_tokens": FEW}),
        Ask("refused", "/v1/chat/completions", chat | {"temperature": -number}, status=400),
        Ask("unknown model", "/v1/chat/completions", chat | {"model": f"model-{number}"}, status=404),
        Ask("predicted", "/v1/chat/completions", chat | {"prediction": {"type": "content", "content": texts[number % len(texts)]}}),
        Ask("plain", "/v1/chat/completions", chat | {"speculative": False}),
    )
    return kinds[number % len(kinds)]


class SoakError(Exception):
    """A request was answered otherwise than it must be."""


async def measure(
    options: Sequence[str],
    texts: Sequence[str],
    *,
    num_requests: int,
    num_longest: int,
    concurrency: int,
    every: int,
    progress: Callable[[], None],
) -> SoakResult:
    """Start a server with ``options``, send all requests, and look at its memory after each ``every``; raises SoakError.

    Before them ``num_longest`` texts that are as long as can be fill the memory for keys and values.
    """
    server = await Process.start(moaserve("serve", "--port", "0", *options), None)
    numbers, kinds, memory = iter(range(num_requests)), Counter[str](), []
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=httpx.Limits(max_connections=None)) as client:

            async def work() -> None:
                for number in numbers:
                    one = asked(number, texts)
                    await _send(client, one)
                    kinds[one.kind] += 1
                    progress()
                    if (done := kinds.total()) % every == 0:
                        memory.append((done, server.resident_bytes))

            await fill(client, num_longest)
            began = time.perf_counter()
            await asyncio.gather(*(work() for _ in range(concurrency)))
            seconds = time.perf_counter() - began
    finally:
        await server.stop()
    return SoakResult(dict(kinds), seconds, tuple(memory))


async def _send(client: httpx.AsyncClient, one: Ask) -> None:
    async with client.stream("POST", one.path, json=one.body) as response:
        if response.status_code != one.status:
            told = (await response.aread()).decode(errors="replace")
            raise SoakError(f"{one.kind}: {response.status_code} instead of {one.status}: {told[:500]}")
        seen = 0
        async for line in response.aiter_lines():
            if line.startswith("data:") and '"error"' in line:
                raise SoakError(f"{one.kind}: {line[:500]}")
            seen += 1
            if seen == one.leaves_after:
                return
