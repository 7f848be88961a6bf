"""A replica's side: what an engine says of a request, in few messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

from speculative.errors import EngineError, EngineNotReadyError
from speculative.replicas.messages import Failure, Told, Wish
from speculative.request import Request, RequestOutput

GATHER_S: Final = 0.02
"""Seconds for which outputs may wait for others, once a text has begun: a message costs more than its bytes, and nobody reads that
fast. What an edge waits for is told at once."""

Generate = Callable[[Request], AsyncGenerator[RequestOutput, None]]


async def answer(
    name: str, target: str, generate: Generate, request: Request, wish: Wish, gather_s: float = GATHER_S
) -> AsyncGenerator[Told, None]:
    """All messages about a request: first who has taken it, then its outputs, and a failure where it fails."""
    if wish.target and wish.target != target:
        failure = Failure.of(EngineNotReadyError("this replica serves another model"))
        yield Told(name, time.monotonic(), failure=failure)
        return
    yield Told(name, time.monotonic())
    arrived: asyncio.Queue[RequestOutput | EngineError | None] = asyncio.Queue()
    reading = asyncio.create_task(_read(generate(request), arrived))
    try:
        ended, begun = False, False
        while not ended:
            gathered = [await arrived.get()]
            if begun and not request.remote and _goes_on(gathered[0]):
                await asyncio.sleep(gather_s)
            while not arrived.empty():
                gathered.append(arrived.get_nowait())
            outputs = tuple(each for each in gathered if isinstance(each, RequestOutput))
            begun = begun or any(output.new_token_ids for output in outputs)
            error = next((each for each in gathered if isinstance(each, EngineError)), None)
            ended = gathered[-1] is None or error is not None
            if outputs or error is not None:
                yield Told(name, time.monotonic(), outputs, None if error is None else Failure.of(error))
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _read(outputs: AsyncGenerator[RequestOutput, None], arrived: asyncio.Queue[RequestOutput | EngineError | None]) -> None:
    try:
        async with aclosing(outputs):
            async for output in outputs:
                arrived.put_nowait(output)
        arrived.put_nowait(None)
    except EngineError as error:
        arrived.put_nowait(error)
    except Exception as error:
        arrived.put_nowait(EngineError(f"the replica failed: {error}"))
        raise


def _goes_on(output: RequestOutput | EngineError | None) -> bool:
    return isinstance(output, RequestOutput) and output.finish_reason is None
