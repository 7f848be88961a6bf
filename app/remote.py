"""Texts that are drafted for elsewhere, run as HTTP requests are."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from app.answering import compile_grammar, limited
from app.deps import Serving
from app.errors import ApiError, RequestTimeoutError, TooManyRequestsError
from app.generation import places_for, run
from speculative.errors import ProtocolError
from speculative.remote.host import Generate
from speculative.request import Request, RequestOutput


def generating(serving: Serving, take_rate: Callable[[], None], owner: str) -> Generate:
    """What runs the texts of one connection, each of which counts as a request of its caller's, whose key ``owner`` names."""

    async def generate(request: Request) -> AsyncGenerator[RequestOutput, None]:
        try:
            take_rate()
            if (grammar := request.params.grammar) is not None:
                await compile_grammar(serving, grammar)
            serving.engine.validate(request)
            places = places_for(serving, [request], owner)
            try:
                async with aclosing(limited(serving, run(serving, [request], places))) as outputs:
                    async for _, output in outputs:
                        yield output
            finally:
                places.release()
        except ApiError as error:
            serving.metrics.error(error.status, error.code)
            raise _told(error) from error

    return generate


def _told(error: ApiError) -> ProtocolError:
    if isinstance(error, TooManyRequestsError):
        return ProtocolError("overloaded", error.message)
    if isinstance(error, RequestTimeoutError):
        return ProtocolError("limit_exceeded", error.message)
    return ProtocolError("engine_failed", error.message)
