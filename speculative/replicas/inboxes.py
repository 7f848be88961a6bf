"""Inboxes: what replicas tell an ingress, dealt out to the texts that it is about."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager

from speculative.errors import EngineError, ReplicaLostError
from speculative.replicas.messages import Told


class Inbox:
    """Messages about one request. ``replica`` is the one that has taken it, "" before; ``has_ended`` is set once nothing more is
    said.
    """

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.replica = ""
        self.has_ended = asyncio.Event()
        self._arrived: asyncio.Queue[Told | EngineError] = asyncio.Queue()

    def put(self, told: Told) -> None:
        """A replica says this."""
        self.replica = told.replica
        self._arrived.put_nowait(told)

    def fail(self, error: EngineError) -> None:
        """No more will be said, for this reason; what was said before comes first."""
        self._arrived.put_nowait(error)

    async def messages(self) -> AsyncGenerator[Told, None]:
        """What is said until the text ends; raises what ``fail`` was told."""
        while not self.has_ended.is_set():
            told = await self._arrived.get()
            if isinstance(told, EngineError):
                raise told
            if told.is_last:
                self.has_ended.set()
            yield told


class Inboxes:
    """Those of all requests under way, by their ids."""

    def __init__(self) -> None:
        self._open: dict[str, Inbox] = {}

    @contextmanager
    def opened(self, request_id: str) -> Iterator[Inbox]:
        """An inbox for as long as the request is under way."""
        inbox = self._open[request_id] = Inbox()
        try:
            yield inbox
        finally:
            del self._open[request_id]

    def deal(self, messages: Iterable[Told]) -> None:
        """Messages of a replica; those about requests that have ended are of no use any more."""
        for told in messages:
            if (inbox := self._open.get(told.request_id)) is not None:
                inbox.put(told)

    def lost(self, replica: str) -> None:
        """That replica says no more, and what it has taken goes on elsewhere."""
        for inbox in self._open.values():
            if inbox.replica == replica:
                inbox.fail(ReplicaLostError("the replica says no more", replica))

    def fail(self, request_id: str, error: EngineError) -> None:
        """No more will be said of that request, if it is under way still."""
        if (inbox := self._open.get(request_id)) is not None:
            inbox.fail(error)

    def expect(self, replica: str, since: float) -> bool:
        """Whether a replica that was sent nothing ``since`` a monotonic time may have something to say still."""
        return any(inbox.replica == replica or (not inbox.replica and inbox.began <= since) for inbox in self._open.values())
