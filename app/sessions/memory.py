"""Responses in this process's memory; a restart forgets them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from app.sessions.encoding import decode, encode
from app.sessions.observing import StoreObserver, Unobserved, observed
from app.sessions.store import StoredResponse


@dataclass(slots=True)
class _Shelf:
    """What one owner has: when each was put and what, the oldest first."""

    kept: OrderedDict[str, tuple[float, bytes]] = field(default_factory=OrderedDict)
    size: int = 0


class MemoryStore:
    """A ResponseStore of at most ``most`` responses and ``most_bytes`` bytes; each is kept for ``seconds``.

    Where there is no room, the oldest of the owner that has most gives way: who floods the store loses its own. Responses are
    kept as JSON: so their bytes can be counted, and nobody changes what another reads.
    """

    def __init__(
        self,
        most: int,
        most_bytes: int,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        observer: StoreObserver | None = None,
    ) -> None:
        self._most, self._most_bytes, self._seconds, self._clock = most, most_bytes, seconds, clock
        self._observer = observer or Unobserved()
        self._shelves: dict[str, _Shelf] = {}  # by owner, who has put something last at the end
        self._count = 0
        self._bytes = 0

    async def put(self, owner: str, response_id: str, stored: StoredResponse, lease: float | None = None) -> None:
        """As in ResponseStore; what alone is larger than the whole store is not kept."""
        with observed(self._observer, "put") as work:
            data = await encode(stored)
            work.outcome = "ok"
            self._forget(owner, response_id)
            if len(data) > self._most_bytes:
                return
            self._forget_expired()
            self._add(owner, response_id, data)
            self._observer.carried("written", len(data))
            while self._count > self._most:
                self._forget_oldest(max(self._shelves, key=lambda owner: len(self._shelves[owner].kept)))
            while self._bytes > self._most_bytes:
                self._forget_oldest(max(self._shelves, key=lambda owner: self._shelves[owner].size))

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """As in ResponseStore."""
        with observed(self._observer, "get") as work:
            kept = self._look_up(owner, response_id)
            work.outcome = "hit" if kept is not None else "miss"
            self._observer.carried("read", len(kept or b""))
            return await decode(kept) if kept is not None else None

    async def delete(self, owner: str, response_id: str) -> bool:
        """As in ResponseStore."""
        with observed(self._observer, "delete") as work:
            there = self._look_up(owner, response_id) is not None
            self._forget(owner, response_id)
            work.outcome = "ok" if there else "miss"
            return there

    def _look_up(self, owner: str, response_id: str) -> bytes | None:
        self._forget_expired()
        shelf = self._shelves.get(owner)
        kept = shelf.kept.get(response_id) if shelf is not None else None
        return kept[1] if kept is not None else None

    def _add(self, owner: str, response_id: str, data: bytes) -> None:
        shelf = self._shelves[owner] = self._shelves.pop(owner, _Shelf())
        shelf.kept[response_id] = (self._clock(), data)
        shelf.size += len(data)
        self._count += 1
        self._bytes += len(data)

    def _forget_expired(self) -> None:
        now = self._clock()
        for owner, shelf in list(self._shelves.items()):
            while shelf.kept and now - next(iter(shelf.kept.values()))[0] >= self._seconds:
                self._forget_oldest(owner)

    def _forget_oldest(self, owner: str) -> None:
        self._forget(owner, next(iter(self._shelves[owner].kept)))

    def _forget(self, owner: str, response_id: str) -> None:
        shelf = self._shelves.get(owner)
        if shelf is None or (kept := shelf.kept.pop(response_id, None)) is None:
            return
        shelf.size -= len(kept[1])
        self._count -= 1
        self._bytes -= len(kept[1])
        if not shelf.kept:
            del self._shelves[owner]
