"""Blocks in this process's memory; a restart forgets them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from app.sessions.observing import StoreObserver, Unobserved, observed


class MemoryBlocks:
    """A BlockStore of at most ``most_bytes`` bytes, the last used; each is kept for ``seconds`` after its last use."""

    def __init__(
        self,
        most_bytes: int,
        seconds: float,
        observer: StoreObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most_bytes, self._seconds, self._clock = most_bytes, seconds, clock
        self._observer = observer or Unobserved()
        self._kept: OrderedDict[str, tuple[float, bytes]] = OrderedDict()  # when last used and what, the longest unused first
        self._bytes = 0

    async def get(self, keys: Sequence[str]) -> list[bytes]:
        """As in BlockStore."""
        with observed(self._observer, "get") as work:
            leading = keys[: self._known(keys)]
            blocks = [self._kept[key][1] for key in leading]
            self._use(leading)
            self._observer.carried("read", sum(map(len, blocks)))
            work.outcome = "hit" if blocks else "miss"
        return blocks

    async def put(self, blocks: Mapping[str, bytes]) -> None:
        """As in BlockStore; a block that alone is larger than the whole store is not kept."""
        with observed(self._observer, "put") as work:
            self._forget_expired()
            for key, block in reversed(list(blocks.items())):
                if key not in self._kept and len(block) <= self._most_bytes:
                    self._kept[key] = (self._clock(), block)
                    self._bytes += len(block)
                    self._observer.carried("written", len(block))
                self._use([key])
            while self._bytes > self._most_bytes:
                self._forget_oldest()
            work.outcome = "ok"

    async def known(self, keys: Sequence[str]) -> int:
        """As in BlockStore."""
        with observed(self._observer, "known") as work:
            count = self._known(keys)
            self._use(keys[:count])
            work.outcome = "hit" if count else "miss"
        return count

    async def close(self) -> None:
        """Forget all."""
        self._kept.clear()
        self._bytes = 0

    def _known(self, keys: Sequence[str]) -> int:
        self._forget_expired()
        return next((count for count, key in enumerate(keys) if key not in self._kept), len(keys))

    def _use(self, keys: Sequence[str]) -> None:
        """Note a use of blocks that are there. Nothing finds a block whose predecessor is gone: the last count as used first."""
        for key in reversed(keys):
            if key in self._kept:
                self._kept[key] = (self._clock(), self._kept[key][1])
                self._kept.move_to_end(key)

    def _forget_expired(self) -> None:
        while self._kept and self._clock() - next(iter(self._kept.values()))[0] >= self._seconds:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, (_, block) = self._kept.popitem(last=False)
        self._bytes -= len(block)
