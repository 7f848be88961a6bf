"""Replicas behind an ingress against servers whose load is dealt out by hand."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from benchmarks.network.processes import Process, moaserve
from benchmarks.replicas.asking import rate

TEXTS = 6
"""Texts of each stream in a round: with two, a third of it is the beginning and the end, where slots are empty."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens a second in each round: of ``replicas``, of as many ``servers``, and of ``one`` server with its share of the load."""

    replicas: tuple[float, ...]
    servers: tuple[float, ...]
    one: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with medians of the rounds' ratios."""
        of_parts = [ours / theirs for ours, theirs in zip(self.replicas, self.servers, strict=True)]
        return asdict(self) | {
            "of_the_sum_of_the_parts": [round(each, 3) for each in of_parts],
            "median_of_the_sum_of_the_parts": round(statistics.median(of_parts), 3),
            "times_one_server": round(statistics.median(a / b for a, b in zip(self.replicas, self.one, strict=True)), 3),
        }


async def throughput(
    given: Mapping[str, Any], cluster: Mapping[str, Any], *, rounds: int, streams: int, max_tokens: int
) -> Throughput:
    """All servers run all the time, and are asked in turn."""
    count = cluster["replicas"]
    ways: dict[str, list[float]] = {"replicas": [], "servers": [], "one": []}
    async with AsyncExitStack() as stack:
        commands = [["serve", *_options(given)] for _ in range(count)] + [["ray", *_options({**given, **cluster})]]
        clients = []
        for command in commands:
            process = await Process.start([*moaserve(*command), "--port", "0"], None)
            stack.push_async_callback(process.stop)
            client = httpx.AsyncClient(base_url=process.url, limits=httpx.Limits(max_connections=None))
            clients.append(await stack.enter_async_context(client))
        alone, together = clients[:count], clients[count:]
        share = streams // count
        for number in range(-1, rounds):  # the first warms all of them up
            first = 10_000 * (number + 2)
            told = {
                "replicas": await rate(together, streams, TEXTS * streams, max_tokens, first),
                "servers": await rate(alone, streams, TEXTS * streams, max_tokens, first + 3000),
                "one": await rate(alone[:1], share, TEXTS * share, max_tokens, first + 6000),
            }
            if number >= 0:
                for name, value in told.items():
                    ways[name].append(round(value, 1))
    return Throughput(*(tuple(ways[name]) for name in ("replicas", "servers", "one")))


def _options(given: Mapping[str, Any]) -> list[str]:
    return [word for name, value in given.items() for word in ("--" + name.replace("_", "-"), str(value))]
