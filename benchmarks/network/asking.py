"""One request over HTTP, as a client sees it, and what it cost."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.network.traffic import Traffic


class AnswerError(Exception):
    """An answer did not come to its end; the message says what came instead."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer: its text, and seconds from asking to its first text (nothing: its end) and to its end.

    ``stats`` is what came under ``metrics``: how speculation went, and on an edge what the network carried.
    """

    text: str
    tokens: int
    first: float
    seconds: float
    stats: dict[str, Any]

    @property
    def tokens_per_second(self) -> float:
        """From asking to the end."""
        return self.tokens / self.seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Those after the first since the first; None of a single token."""
        elapsed = self.seconds - self.first
        return (self.tokens - 1) / elapsed if self.tokens > 1 and elapsed > 0 else None


@dataclass(frozen=True, slots=True)
class Cost:
    """What happened at the link, the server and the edges meanwhile.

    ``busy`` are seconds that the server's engine was at its steps, ``steps`` their number; the others are processor seconds, None
    where the system does not tell.
    """

    traffic: Traffic
    busy: float
    steps: int
    server_cpu: float | None
    edge_cpu: float | None


async def ask(client: httpx.AsyncClient, url: str, prompt: Sequence[int], **parameters: Any) -> Answer:
    """Stream a completion of ``prompt`` from the server or edge at ``url``; raises AnswerError."""
    body = {"prompt": list(prompt), "stream": True, "stream_options": {"include_usage": True}, **parameters}
    text, first = "", 0.0
    usage: dict[str, Any] | None = None
    stats: dict[str, Any] = {}
    began = time.perf_counter()
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            if response.is_error:
                raise AnswerError(f"{url}: {response.status_code}: {(await response.aread()).decode(errors='replace')}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise AnswerError(f"{url}: {chunk['error']['message']}")
                usage = chunk.get("usage") or usage
                for told in (chunk.get("metrics") or {}).values():
                    stats |= told or {}
                for choice in chunk["choices"]:
                    if choice["text"]:
                        first = first or time.perf_counter() - began
                        text += choice["text"]
    except httpx.HTTPError as error:
        raise AnswerError(f"{url}: {type(error).__name__} {error}") from error
    seconds = time.perf_counter() - began
    if usage is None:
        raise AnswerError(f"{url}: the answer ended without usage, after {text[-80:]!r}")
    return Answer(text, usage["completion_tokens"], first or seconds, seconds, stats)


async def engine_seconds(client: httpx.AsyncClient, url: str) -> tuple[float, int]:
    """Seconds that a server's engine has been at its steps, and their number: from its /metrics."""
    response = await client.get(f"{url}/metrics")
    response.raise_for_status()
    return read_engine_seconds(response.text)


def read_engine_seconds(exposition: str) -> tuple[float, int]:
    """As ``engine_seconds``, from what /metrics says."""
    totals = {"moaserve_engine_step_seconds_total": 0.0, "moaserve_engine_steps_total": 0.0}
    for line in exposition.splitlines():
        name = line.partition("{")[0]
        if name in totals:
            totals[name] += float(line.rsplit(" ", 1)[1])
    return totals["moaserve_engine_step_seconds_total"], round(totals["moaserve_engine_steps_total"])
