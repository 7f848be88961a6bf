"""RequestOutputs -> server-sent events. The only file that knows SSE."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from pydantic import BaseModel
from sse_starlette import EventSourceResponse

from app.errors import to_api_error
from app.generation import Outputs, finish_reason
from app.responses import FinishReason, ResponseMetrics, Usage
from speculative.request import RequestStats

logger = logging.getLogger("moaserve.app")

DONE = b"data: [DONE]\n\n"


class ChunkWriter(Protocol):
    """How one API words its chunks."""

    def begin(self, index: int) -> BaseModel | None:
        """A choice's first chunk, if the API has one that carries no text."""

    def text(self, index: int, text: str) -> BaseModel:
        """More text of a choice."""

    def finish(self, index: int, reason: FinishReason, metrics: ResponseMetrics | None) -> BaseModel:
        """A choice's last chunk; the last choice's carries the metrics of the whole response."""

    def summary(self, usage: Usage, metrics: ResponseMetrics) -> BaseModel:
        """The chunk without choices that ends a stream whose caller asked for usage."""


def stream(outputs: Outputs, writer: ChunkWriter, *, count: int, n: int, include_usage: bool) -> EventSourceResponse:
    """The streaming response of ``count`` choices, ``n`` to a prompt; a client that leaves closes ``outputs``."""
    return EventSourceResponse(_events(outputs, writer, count, n, include_usage), sep="\n")


async def _events(outputs: Outputs, writer: ChunkWriter, count: int, n: int, include_usage: bool) -> AsyncGenerator[bytes, None]:
    begun: set[int] = set()
    finished: dict[int, RequestStats] = {}
    try:
        async with aclosing(outputs):
            async for index, output in outputs:
                if index not in begun:
                    begun.add(index)
                    if (first := writer.begin(index)) is not None:
                        yield _event(first)
                if output.text_delta:
                    yield _event(writer.text(index, output.text_delta))
                if output.finish_reason is not None:
                    finished[index] = output.stats
                    metrics = ResponseMetrics.of(list(finished.values())) if len(finished) == count else None
                    yield _event(writer.finish(index, finish_reason(output), metrics))
        if include_usage:
            stats = [finished[index] for index in range(count)]
            yield _event(writer.summary(Usage.of(stats, n), ResponseMetrics.of(stats)))
    except Exception as error:  # the status line is long gone: the error is an event, and clients raise it
        logger.warning("a stream ended with an error: %s", error)
        yield f"data: {to_api_error(error).body()}\n\n".encode()
    yield DONE


def _event(chunk: BaseModel) -> bytes:
    """One event; JSON holds no raw line break, so that one data line is enough."""
    return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n".encode()
