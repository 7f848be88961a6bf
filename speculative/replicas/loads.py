"""How busy replicas are, as one of those sees it who give them work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping


class Loads:
    """How many requests each replica has: one's own to the last one, and others' as the replica said last.

    A request counts from the moment that a replica is chosen for it, so that the next one is not sent there too, until its end is
    known here, so that the one that follows it finds its place.
    """

    def __init__(self) -> None:
        self._places: dict[str, str] = {}
        self._own: Counter[str] = Counter()
        self._others: Mapping[str, int] = {}

    def begin(self, request_id: str) -> None:
        """A request of one's own, which no replica has yet."""
        self._places[request_id] = ""

    def place(self, request_id: str, replica: str) -> None:
        """It is that replica's now; nothing happens where it has ended."""
        if request_id in self._places:
            self._own -= Counter((self._places[request_id],))
            self._places[request_id] = replica
            self._own[replica] += 1

    def end(self, request_id: str) -> None:
        """It is no replica's any more; it may have ended before."""
        self._own -= Counter((self._places.pop(request_id, ""),))

    def hear(self, others: Mapping[str, int]) -> None:
        """What replicas say of how many requests of others they have."""
        self._others = others

    def of(self, replica: str) -> int:
        """How many requests that replica has."""
        return self._own[replica] + self._others.get(replica, 0)
