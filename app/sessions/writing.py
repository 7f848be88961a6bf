"""Writing in the background: no request waits until its blocks are stored."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from app.sessions.blocks import BlockStore
from app.sessions.observing import StoreObserver, Unobserved

QUEUE_BYTES: Final = 256 * 2**20
BATCH_BYTES: Final = 4 * 2**20
DRAIN_S: Final = 2.0

logger = logging.getLogger("moaserve.sessions")


class WrittenLater:
    """A BlockStore whose ``put`` returns at once: blocks wait, up to ``most_bytes`` bytes, until ``blocks`` has taken them.

    Where there is no room, the rest of what is put is dropped, and counted as a put with the outcome ``error``: a row of blocks is
    of no use without its beginning, which waits already. `close` gives what waits ``drain`` seconds.
    """

    def __init__(
        self, blocks: BlockStore, most_bytes: int = QUEUE_BYTES, drain: float = DRAIN_S, observer: StoreObserver | None = None
    ) -> None:
        self._blocks, self._most_bytes, self._drain = blocks, most_bytes, drain
        self._observer = observer or Unobserved()
        self._waiting: dict[str, bytes] = {}
        self._bytes = 0  # of what waits and what is being written
        self._overflown = False
        self._writer: asyncio.Task[None] | None = None
        self._closed = False

    async def get(self, keys: Sequence[str]) -> list[bytes]:
        """As in BlockStore; what still waits is not found."""
        return await self._blocks.get(keys)

    async def known(self, keys: Sequence[str]) -> int:
        """As in BlockStore; what still waits is not found."""
        return await self._blocks.known(keys)

    async def put(self, blocks: Mapping[str, bytes]) -> None:
        """As in BlockStore, but without waiting."""
        if self._closed:
            return
        for key, block in blocks.items():
            if key in self._waiting:
                continue
            if self._bytes + len(block) > self._most_bytes:
                self._drop()
                break
            self._waiting[key] = block
            self._bytes += len(block)
        if self._waiting and self._writer is None:
            # A context of its own: the writer's log lines are not those of the request that it begins with.
            self._writer = contextvars.Context().run(asyncio.get_running_loop().create_task, self._write())

    async def close(self) -> None:
        """Write what waits, as far as there is time, and close the store."""
        self._closed = True
        if self._writer is not None:
            await asyncio.wait([self._writer], timeout=self._drain)
            if self._waiting:
                logger.warning("%d blocks are lost: there was no time to store them", len(self._waiting))
            self._waiting.clear()
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait([self._writer])
        await self._blocks.close()

    async def _write(self) -> None:
        try:
            while self._waiting:
                batch = self._next()
                try:
                    await self._blocks.put(batch)
                except Exception:
                    logger.exception("%d blocks could not be stored", len(batch))
                finally:
                    self._bytes -= sum(map(len, batch.values()))
            self._overflown = False
        finally:
            self._writer = None

    def _next(self) -> dict[str, bytes]:
        batch: dict[str, bytes] = {}
        size = 0
        while self._waiting and size < BATCH_BYTES:
            key = next(iter(self._waiting))
            batch[key] = self._waiting.pop(key)
            size += len(batch[key])
        return batch

    def _drop(self) -> None:
        self._observer.ended("put", "error")
        if not self._overflown:
            self._overflown = True
            logger.warning(
                "blocks come faster than they are stored: those that do not fit in %d bytes are dropped", self._most_bytes
            )
