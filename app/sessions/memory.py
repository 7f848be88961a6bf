"""Responses in this process's memory; a restart forgets them."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable

from app.sessions.observing import StoreObserver, Unobserved, observed
from app.sessions.store import StoredResponse

Key = tuple[str, str]


class MemoryStore:
    """A ResponseStore of at most ``most`` responses and ``most_bytes`` bytes, the newest; each is kept for ``seconds``.

    They are kept as JSON: so its bytes can be counted, and nobody changes what another reads.
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
        self._kept: OrderedDict[Key, tuple[float, bytes]] = OrderedDict()  # when and what, the oldest first
        self._bytes = 0

    async def put(self, owner: str, response_id: str, stored: StoredResponse, lease: float | None = None) -> None:
        """As in ResponseStore; what alone is larger than the whole store is not kept."""
        with observed(self._observer, "put") as work:
            work.outcome = "ok"
            data = json.dumps([stored.document, stored.items, stored.continues]).encode()
            self._forget((owner, response_id))
            if len(data) > self._most_bytes:
                return
            self._kept[owner, response_id] = (self._clock(), data)
            self._bytes += len(data)
            self._observer.carried("written", len(data))
            while len(self._kept) > self._most or self._bytes > self._most_bytes or self._oldest_is_expired():
                self._forget(next(iter(self._kept)))

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """As in ResponseStore."""
        with observed(self._observer, "get") as work:
            kept = self._look_up(owner, response_id)
            work.outcome = "hit" if kept is not None else "miss"
            self._observer.carried("read", len(kept or b""))
            return StoredResponse(*json.loads(kept)) if kept is not None else None

    async def delete(self, owner: str, response_id: str) -> bool:
        """As in ResponseStore."""
        with observed(self._observer, "delete") as work:
            there = self._look_up(owner, response_id) is not None
            self._forget((owner, response_id))
            work.outcome = "ok" if there else "miss"
            return there

    def _look_up(self, owner: str, response_id: str) -> bytes | None:
        while self._oldest_is_expired():
            self._forget(next(iter(self._kept)))
        kept = self._kept.get((owner, response_id))
        return kept[1] if kept is not None else None

    def _oldest_is_expired(self) -> bool:
        if not self._kept:
            return False
        kept_at, _ = next(iter(self._kept.values()))
        return self._clock() - kept_at >= self._seconds

    def _forget(self, key: Key) -> None:
        if (kept := self._kept.pop(key, None)) is not None:
            self._bytes -= len(kept[1])
