"""A replica's side: what an engine says of a request, as messages."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from speculative.config import ModelInfo
from speculative.errors import EngineError, EngineNotReadyError
from speculative.replicas.messages import Failure, Told, Wish
from speculative.request import Request, RequestOutput

Generate = Callable[[Request], AsyncGenerator[RequestOutput, None]]


async def answer(name: str, info: ModelInfo, generate: Generate, request: Request, wish: Wish) -> AsyncGenerator[Told, None]:
    """All messages about a request: first who has taken it, then its outputs, and a failure where it fails.

    A text's first tokens, its end and whatever an edge waits for are told at once; all else can wait for others' messages.
    """

    def told(output: RequestOutput | None = None, failure: EngineError | None = None, *, can_wait: bool = False) -> Told:
        failed = None if failure is None else Failure.of(failure)
        return Told(request.request_id, name, time.monotonic(), output, failed, can_wait)

    if not wish.fits(info):
        yield told(failure=EngineNotReadyError("this replica serves another model"))
        return
    yield told(can_wait=True)
    begun = False
    try:
        async with aclosing(generate(request)) as outputs:
            async for output in outputs:
                yield told(output, can_wait=begun and not request.remote and output.finish_reason is None)
                begun = begun or bool(output.new_token_ids)
    except EngineError as error:
        yield told(failure=error)
    except Exception as error:
        yield told(failure=EngineError(f"the replica failed: {error}"))
        raise
