"""RequestOutputs -> server-sent events. The only file that knows SSE."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Final, Protocol

import anyio
import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.errors import to_api_error
from app.generation import finish_reason
from app.responses import ChatCompletionChunk, Completion, EdgeNote, FinishReason
from app.responses_api.events import Event
from app.revising import Outputs
from app.schemas import ChoicesRequest
from app.usage import ResponseMetrics, Totals
from speculative.request import Request, RequestOutput, RequestStats

logger = logging.getLogger("moaserve.app")

Chunk = ChatCompletionChunk | Completion
DONE: Final = b"data: [DONE]\n\n"
PING: Final = b": ping\n\n"
PING_S: Final = 15.0
"""Seconds between two comments that keep a silent stream's connection open: proxies end it after a minute or less."""

AT_ONCE: Final = 32
"""Events that are collected before others have their turn on the event loop, where more have come than can be told."""

_MARK: Final = "\0text\0"
"""Stands for a chunk's text while all around it is written."""


class ChunkWriter(Protocol):
    """How one API words its chunks."""

    def begin(self, index: int, first: RequestOutput) -> Chunk | None:
        """What comes before a choice's text, if the API has a chunk for that."""

    def text(self, index: int, output: RequestOutput) -> Chunk | str | None:
        """More of a choice, if there is anything to tell; the mere text where that is all, for which ``words`` has the chunk."""

    def words(self, index: int, text: str) -> Chunk:
        """A chunk with more text of a choice and nothing else."""

    def finish(self, index: int, reason: FinishReason, metrics: ResponseMetrics | None) -> Chunk:
        """A choice's last chunk; the last choice's carries the metrics of the whole response."""

    def summary(self, metrics: ResponseMetrics) -> Chunk:
        """The chunk without choices that ends a stream whose caller asked for usage."""


def stream(
    outputs: Outputs,
    writer: ChunkWriter,
    requests: Sequence[Request],
    body: ChoicesRequest,
    end: Callable[[], None],
    failed: Callable[[int, str], None],
) -> StreamingResponse:
    """The streaming response to ``body``, the choices of ``requests``; a client that leaves closes ``outputs``.

    ``end`` is called however the response ends, also where the client left before ``outputs`` were begun, and ``failed`` with the
    status and the code of an error that ends it.
    """
    return _Stream(_events(outputs, writer, requests, body, failed), end)


class _Stream(StreamingResponse):
    """Sends events as they come; those that come while others are being sent go together, each still an event.

    A client that leaves ends it, whatever it waits for.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], end: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"}, media_type="text/event-stream")
        self._events, self._end = events, end
        self._unsent: list[bytes] = []
        self._news = asyncio.Event()
        self._complete = False
        self._failure: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._watch, receive, group.cancel_scope)
                group.start_soon(self._collect)
                try:
                    await self._send(send)
                except Exception as error:  # a group would wrap it
                    self._failure = error
                group.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self._events.aclose()  # a client may leave while none of its code runs
            self._end()
        if self._failure is not None:
            raise self._failure

    async def _watch(self, receive: Receive, everything: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        everything.cancel()

    async def _collect(self) -> None:
        try:
            count = 0
            async for event in self._events:
                self._unsent.append(event)
                self._news.set()
                count += 1
                if count % AT_ONCE == 0:  # nothing else gives way while there is always one more
                    await asyncio.sleep(0)
        except Exception as error:
            self._failure = error
        self._complete = True
        self._news.set()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        loop = asyncio.get_running_loop()
        last = loop.time()
        pinging: asyncio.TimerHandle

        def ping() -> None:
            nonlocal pinging
            if (left := last + PING_S - loop.time()) <= 0:
                self._unsent.append(PING)
                self._news.set()
            pinging = loop.call_later(left if left > 0 else PING_S, ping)

        pinging = loop.call_later(PING_S, ping)
        try:
            while not (self._complete and not self._unsent):
                await self._news.wait()
                self._news.clear()
                if self._unsent:
                    body = b"".join(self._unsent)
                    self._unsent.clear()
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    last = loop.time()
        finally:
            pinging.cancel()
        if self._failure is None:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def stream_events(events: AsyncGenerator[Event, None], end: Callable[[], None]) -> StreamingResponse:
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
    totals = Totals([RequestStats(prompt_tokens=len(request.prompt_token_ids)) for request in requests], body.candidates)
    begun: set[int] = set()
    unfinished = len(requests)

    told_always = body.continuous_usage or body.continuous_metrics
    frames: dict[int, tuple[bytes, bytes]] = {}

    def event(chunk: Chunk, *, last: bool = False) -> bytes:
        # OpenAI has every chunk but the last say "usage": null, once usage was asked for.
        if body.include_usage or body.continuous_usage:
            chunk.usage = totals.usage() if last or body.continuous_usage else None
        if body.continuous_metrics:
            chunk.metrics = totals.metrics()
        return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n".encode()  # JSON holds no raw line break

    def text_event(index: int, text: str) -> bytes:
        """As ``event`` of the chunk with these words; all but they is written once for a choice."""
        if told_always:
            return event(writer.words(index, text))
        if index not in frames:
            before, after = event(writer.words(index, _MARK)).split(msgspec.json.encode(_MARK))
            frames[index] = before, after
        before, after = frames[index]
        return before + msgspec.json.encode(text) + after

    try:
        async with aclosing(outputs):
            async for index, output in outputs:
                totals.put(index, output.stats)
                if index not in begun:
                    begun.add(index)
                    if (first := writer.begin(index, output)) is not None:
                        yield event(first)
                if (more := writer.text(index, output)) is not None:
                    yield text_event(index, more) if isinstance(more, str) else event(more)
                if output.finish_reason is not None:
                    unfinished -= 1
                    metrics = None if unfinished else totals.metrics()
                    finish = writer.finish(index, finish_reason(output), metrics)
                    if note := EdgeNote.of_end(output):
                        finish.edge = note
                    yield event(finish)
        if body.include_usage:
            yield event(writer.summary(totals.metrics()), last=True)
    except Exception as error:  # the status line is long gone: the error is an event, and clients raise it
        logger.warning("a stream ended with an error: %s", error)
        told = to_api_error(error)
        failed(told.status, told.code)
        yield f"data: {told.body()}\n\n".encode()
    yield DONE
