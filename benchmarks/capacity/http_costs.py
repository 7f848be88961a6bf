"""What HTTP costs the event loop: for a request, and for each token that is streamed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import httpx

from benchmarks.capacity.costs import HttpCosts
from benchmarks.network.processes import Process, ProcessError, moaserve

FEW, MANY = 1, 129
"""Tokens of the two kinds of answers whose costs are compared."""


async def measure_http(server: Sequence[str], *, requests: int, progress: Callable[[], None]) -> HttpCosts:
    """Start a server with the options ``server`` and stream answers of two lengths, one at a time, in turn.

    Raises ProcessError, also where the system does not tell a thread's processor time; httpx.HTTPError.
    """
    process = await Process.start(moaserve("serve", "--port", "0", *server), None)
    seconds: dict[int, list[float]] = {FEW: [], MANY: []}
    sizes: dict[int, list[int]] = {FEW: [], MANY: []}
    try:
        async with httpx.AsyncClient(timeout=None, base_url=process.url) as client:
            for number in range(requests + 1):
                for length in (FEW, MANY):
                    before = process.loop_seconds
                    size = await _stream(client, length)
                    after = process.loop_seconds
                    if before is None or after is None:
                        raise ProcessError("this system does not tell what processor time a thread has had: it takes Linux")
                    if number:  # the first of all pays for what all others find done
                        seconds[length].append(after - before)
                        sizes[length].append(size)
                progress()
    finally:
        await process.stop()
    token = (median(seconds[MANY]) - median(seconds[FEW])) / (MANY - FEW)
    token_bytes = (median(sizes[MANY]) - median(sizes[FEW])) / (MANY - FEW)
    return HttpCosts(max(0.0, median(seconds[FEW]) - token), max(0.0, token), token_bytes)


async def _stream(client: httpx.AsyncClient, tokens: int) -> int:
    """Bytes of a streamed answer of so many tokens."""
    body = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    size = 0
    async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        if response.is_error:
            await response.aread()
        response.raise_for_status()
        async for part in response.aiter_raw():
            size += len(part)
    return size
