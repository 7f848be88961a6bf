"""RequestOutputs -> server-sent events. The only file that knows SSE."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

import anyio
from sse_starlette import EventSourceResponse
from sse_starlette.sse import AppStatus
from starlette.types import Receive, Scope, Send

from app.errors import to_api_error
from app.generation import finish_reason
from app.responses import ChatCompletionChunk, Completion, FinishReason
from app.responses_api.events import Event
from app.revising import Outputs
from app.schemas import ChoicesRequest
from app.usage import ResponseMetrics, Usage
from speculative.request import Request, RequestOutput, RequestStats

logger = logging.getLogger("moaserve.app")

Chunk = ChatCompletionChunk | Completion
DONE = b"data: [DONE]\n\n"


class ChunkWriter(Protocol):
    """How one API words its chunks."""

    def begin(self, index: int, first: RequestOutput) -> Chunk | None:
        """What comes before a choice's text, if the API has a chunk for that."""

    def text(self, index: int, output: RequestOutput) -> Chunk | None:
        """More text of a choice, or log-probabilities of tokens that are no whole text yet, if there is anything to tell."""

    def finish(self, index: int, reason: FinishReason, metrics: ResponseMetrics | None) -> Chunk:
        """A choice's last chunk; the last choice's carries the metrics of the whole response."""

    def summary(self, metrics: ResponseMetrics) -> Chunk:
        """The chunk without choices that ends a stream whose caller asked for usage."""


def finish_streams_at_shutdown() -> None:
    """Let streams end by themselves when the server is told to stop; sse-starlette would cut them off at once."""
    AppStatus.enable_automatic_graceful_drain = False


def stream(
    outputs: Outputs,
    writer: ChunkWriter,
    requests: Sequence[Request],
    body: ChoicesRequest,
    end: Callable[[], None],
    failed: Callable[[int, str], None],
) -> EventSourceResponse:
    """The streaming response to ``body``, the choices of ``requests``; a client that leaves closes ``outputs``.

    ``end`` is called however the response ends, also where the client left before ``outputs`` were begun, and ``failed`` with the
    status and the code of an error that ends it.
    """
    return _Stream(_events(outputs, writer, requests, body, failed), end)


class _Stream(EventSourceResponse):
    def __init__(self, events: AsyncGenerator[bytes, None], end: Callable[[], None]) -> None:
        super().__init__(events, sep="\n")
        self._events, self._end = events, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True):
                await self._events.aclose()  # a client may leave while none of its code runs
            self._end()


def stream_events(events: AsyncGenerator[Event, None], end: Callable[[], None]) -> EventSourceResponse:
    """A stream of /v1/responses: its events have names, and no [DONE] follows the last; otherwise as ``stream``."""
    return _Stream(_named(events), end)


async def _named(events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for event in events:
            yield f"event: {event.type}\ndata: {event.model_dump_json(exclude_unset=True)}\n\n".encode()


async def _events(
    outputs: Outputs,
    writer: ChunkWriter,
    requests: Sequence[Request],
    body: ChoicesRequest,
    failed: Callable[[int, str], None],
) -> AsyncGenerator[bytes, None]:
    stats = [RequestStats(prompt_tokens=len(request.prompt_token_ids)) for request in requests]
    begun: set[int] = set()
    unfinished = len(requests)

    def event(chunk: Chunk, *, last: bool = False) -> bytes:
        # OpenAI has every chunk but the last say "usage": null, once usage was asked for.
        if body.include_usage or body.continuous_usage:
            chunk.usage = Usage.of(stats, body.candidates) if last or body.continuous_usage else None
        if body.continuous_metrics:
            chunk.metrics = ResponseMetrics.of(stats)
        return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n".encode()  # JSON holds no raw line break

    try:
        async with aclosing(outputs):
            async for index, output in outputs:
                stats[index] = output.stats
                if index not in begun:
                    begun.add(index)
                    if (first := writer.begin(index, output)) is not None:
                        yield event(first)
                if (more := writer.text(index, output)) is not None:
                    yield event(more)
                if output.finish_reason is not None:
                    unfinished -= 1
                    metrics = None if unfinished else ResponseMetrics.of(stats)
                    yield event(writer.finish(index, finish_reason(output), metrics))
        if body.include_usage:
            yield event(writer.summary(ResponseMetrics.of(stats)), last=True)
    except Exception as error:  # the status line is long gone: the error is an event, and clients raise it
        logger.warning("a stream ended with an error: %s", error)
        told = to_api_error(error)
        failed(told.status, told.code)
        yield f"data: {told.body()}\n\n".encode()
    yield DONE
