"""A session's end of a connection."""

from __future__ import annotations

from collections.abc import Callable

from speculative.remote.frames import Closed, Error
from speculative.remote.outgoing import Outgoing


class Line:
    """Where a session, ``number`` on its connection, tells what it has; ``released`` is told when the number is free again."""

    def __init__(self, number: int, outgoing: Outgoing, released: Callable[[int], None]) -> None:
        self.number = number
        self.tell = outgoing.put
        self._outgoing, self._released = outgoing, released

    @property
    def has_room(self) -> bool:
        """Whether the peer reads what it is sent."""
        return self._outgoing.has_room

    async def room(self) -> None:
        """Return once it does, or is lost."""
        await self._outgoing.room()

    def end(self, frame: Closed | Error) -> None:
        """Say that there is nothing more to tell, and why."""
        self._released(self.number)
        self._outgoing.put(frame)
