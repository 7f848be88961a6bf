"""Blocks in Redis, for all servers that share it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from app.sessions.observing import StoreObserver, Unobserved, observed
from app.sessions.redis_connection import RedisConnection
from app.sessions.redis_values import CHUNK_BYTES, RedisValues, Row

FIRST_ASKED: Final = 4
MOST_ASKED: Final = 256


class RedisBlocks:
    """A BlockStore of at most ``most_bytes`` bytes of all servers together, the last used; each is kept ``seconds`` after that.

    ``get`` and ``known`` take at most the connection's timeout; ``get`` gives what has come until then. It asks for as many blocks
    at once as make some MiB, as far as their size is known, and for a few where nothing is.
    """

    def __init__(
        self, connection: RedisConnection, prefix: str, most_bytes: int, seconds: float, observer: StoreObserver | None = None
    ) -> None:
        self._patience = connection.timeout
        self._observer = observer or Unobserved()
        self._values = RedisValues(connection, prefix, "block", seconds, most_bytes, observer=observer)
        self._asked = FIRST_ASKED

    async def get(self, keys: Sequence[str]) -> list[bytes]:
        """As in BlockStore."""
        blocks: list[bytes] = []
        row = Row()
        ends = time.monotonic() + self._patience
        with observed(self._observer, "get") as work:
            while (place := len(blocks)) < len(keys) and (left := ends - time.monotonic()) > 0:
                names = keys[place : place + self._asked]
                blocks += await self._values.leading(names, row, place, left, lenient=place > 0)
                if len(blocks) > place:
                    self._asked = min(MOST_ASKED, max(1, CHUNK_BYTES // max(1, len(blocks[-1]))))
                if len(blocks) < place + len(names):
                    break
            work.outcome = "hit" if blocks else "miss"
        return blocks

    async def put(self, blocks: Mapping[str, bytes]) -> None:
        """As in BlockStore; a block that alone is larger than the whole store is not kept."""
        items, row = list(blocks.items()), Row()
        with observed(self._observer, "put") as work:
            for first in range(0, len(items), MOST_ASKED):
                some = items[first : first + MOST_ASKED]
                there = await self._values.used([key for key, _ in some], row, first)
                await self._put_missing([(first + i, *item) for i, item in enumerate(some) if not there[i]], row)
            work.outcome = "ok"

    async def known(self, keys: Sequence[str]) -> int:
        """As in BlockStore."""
        count, row = 0, Row()
        with observed(self._observer, "known") as work:
            for first in range(0, len(keys), MOST_ASKED):
                there = await self._values.used(keys[first : first + MOST_ASKED], row, first)
                count += there.index(False) if False in there else len(there)
                if False in there:
                    break
            work.outcome = "hit" if count else "miss"
        return count

    async def close(self) -> None:
        """Nothing is held; who made the connection closes it."""

    async def _put_missing(self, items: Sequence[tuple[int, str, bytes]], row: Row) -> None:
        """Put blocks, each with its place in the row, in chunks of neighbours of some MiB."""
        chunk: list[tuple[str, bytes]] = []
        begins = size = 0
        for place, key, block in items:
            if not self._values.fits(block):
                continue
            if chunk and (place != begins + len(chunk) or size + len(block) > CHUNK_BYTES):
                await self._values.put(chunk, row, begins)
                chunk, size = [], 0
            if not chunk:
                begins = place
            chunk.append((key, block))
            size += len(block)
        if chunk:
            await self._values.put(chunk, row, begins)
