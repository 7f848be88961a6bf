"""The three ways to tell a response: as a stream, whole, or later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from fastapi import Request as HttpRequest
from fastapi import Response

from app.admission import Places
from app.deps import Serving
from app.errors import UnavailableError, to_api_error
from app.generation import unless_disconnected
from app.responses_api.bodies import RUNNING, ResponseBody
from app.responses_api.events import Event
from app.responses_api.items import Item
from app.responses_api.writer import ResponseWriter
from app.revising import Outputs
from app.sessions.store import StoredResponse
from app.streaming import stream_events
from speculative.errors import EngineStepError

LEASE_S = 60.0
"""How long a response that is worked at is found after its server has died."""
RENEWED_EVERY_S = 20.0

logger = logging.getLogger("moaserve.app")


@dataclass(frozen=True, slots=True)
class Answering:
    """A response in the making: where its outputs come from, who words them, and who may have it again.

    ``continues``: see `StoredResponse`.
    """

    serving: Serving
    owner: str
    items: list[Item]
    places: Places
    outputs: Outputs
    writer: ResponseWriter
    continues: bool = False
    keeping: asyncio.Lock = field(default_factory=asyncio.Lock)

    def streamed(self) -> Response:
        """Events as they come; a client that leaves aborts the work, and nothing is kept."""
        return stream_events(self._events(), self.places.release)

    async def whole(self, http: HttpRequest) -> Response:
        """One document at the end; errors are raised, and a client that leaves aborts the work."""
        self.writer.begin()
        try:
            await unless_disconnected(http, self._finish())
        finally:
            self.places.release()
        return document(self.writer.response)

    async def later(self) -> Response:
        """The response as it is: queued. It is worked at from now on, whoever leaves."""
        response = self.writer.response
        await self._keep()
        if await self.serving.store.get(self.owner, response.id) is None:
            self.places.release()
            raise UnavailableError("This server keeps no responses now, so none can be asked for later.")
        self.serving.jobs.start(self.owner, response.id, self._work(), self._cancelled, self.places.release)
        return document(response)

    async def _told(self) -> AsyncGenerator[Event, None]:
        """All events after the first two; the response is kept before its last event is told."""
        async with aclosing(self.outputs):
            async for _, output in self.outputs:
                if self.writer.response.status == "queued":  # in the background nobody was told
                    self.writer.begin()
                    await self._keep()
                events = self.writer.step(output)
                if output.finish_reason is not None:
                    await self._keep()
                for event in events:
                    yield event
        if self.writer.response.status in RUNNING:
            raise EngineStepError("a request ended without a finish reason")

    async def _events(self) -> AsyncGenerator[Event, None]:
        for event in self.writer.begin():
            yield event
        try:
            async with aclosing(self._told()) as events:
                async for event in events:
                    yield event
        except Exception as error:
            for event in await self._failed(error):
                yield event

    async def _finish(self) -> None:
        async with aclosing(self._told()) as events:
            async for _ in events:
                pass

    async def _work(self) -> None:
        renewing = asyncio.create_task(self._renew())
        try:
            await self._finish()
        except Exception as error:
            await self._failed(error)
        finally:
            renewing.cancel()

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEWED_EVERY_S)
            await self._keep()

    async def _cancelled(self) -> None:
        self.writer.cancel()
        await self._keep()

    async def _failed(self, error: Exception) -> list[Event]:
        logger.warning("a response ended with an error: %s", error)
        known = to_api_error(error)
        self.serving.metrics.error(known.status, known.code)
        events = self.writer.fail(known)
        await self._keep()
        return events

    async def _keep(self) -> None:
        response = self.writer.response
        if response.store:
            async with self.keeping:  # what is kept last is the newest
                document = response.model_dump(mode="json", exclude_unset=True)
                stored = StoredResponse(document, self.items, self.continues)
                lease = LEASE_S if response.status in RUNNING else None
                await self.serving.store.put(self.owner, response.id, stored, lease)


def document(response: ResponseBody) -> Response:
    """A response as one JSON document."""
    return Response(response.model_dump_json(exclude_unset=True), media_type="application/json")
