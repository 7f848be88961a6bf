"""Loads: one that comes when it comes, whatever the server does, and one that waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from benchmarks.serving.client import Clock

_Result = TypeVar("_Result")
Send = Callable[[int, float], Awaitable[_Result]]
"""Sends the request of a number, which is due at a time, and brings what became of it."""
LEAD_S = 0.1
"""From deciding on a load to its beginning."""
AWAKE_S = 0.005
"""Before a request is due this process does not sleep: timers are milliseconds late, more where a virtual processor must wake."""


async def open_loop(
    times: Sequence[float],
    send: Send[_Result],
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[_Result]:
    """Send each request at its time, in seconds from the beginning, and wait for all of them.

    None waits for another's answer. One that this process sends late is due at its time all the same: to measure from when it was
    sent would leave out the very seconds that a user would have waited (coordinated omission).
    """
    began = clock() + LEAD_S
    running: list[asyncio.Future[_Result]] = []
    for number, at in enumerate(times):
        while (left := began + at - clock()) > 0:
            await sleep(max(0.0, left - AWAKE_S))
        running.append(asyncio.ensure_future(send(number, began + at)))
    return list(await asyncio.gather(*running))


async def closed_loop(count: int, at_once: int, send: Send[_Result], clock: Clock = time.perf_counter) -> list[_Result]:
    """``at_once`` requests at any time until all have been sent: each is due when one before it has its answer."""
    waiting = list(range(count))[::-1]
    results: dict[int, _Result] = {}

    async def work() -> None:
        while waiting:
            number = waiting.pop()
            results[number] = await send(number, clock())

    await asyncio.gather(*(work() for _ in range(at_once)))
    return [results[number] for number in range(count)]


def sustained_rate(ends: Sequence[float], at_once: int) -> float:
    """Requests a second of a closed loop while it was full: without its first ``at_once`` ends and those after its last request.

    ``ends`` are at least three times ``at_once`` times.
    """
    ordered = sorted(ends)
    full = ordered[at_once - 1 : len(ordered) - at_once + 1]
    return (len(full) - 1) / (full[-1] - full[0])
