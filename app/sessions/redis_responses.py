"""Responses in Redis: they outlive this server, and others go on with them."""

from __future__ import annotations

import hashlib

from app.sessions.encoding import decode_foreign, encode
from app.sessions.observing import StoreObserver, Unobserved, observed
from app.sessions.redis_connection import RedisConnection
from app.sessions.redis_values import RedisValues
from app.sessions.store import StoredResponse


class RedisResponses:
    """A ResponseStore of at most ``most`` responses and ``most_bytes`` bytes of all servers together.

    Where there is no room, the oldest of the owner that has most gives way, as in MemoryStore; among thousands a sample says who.

    Each is kept for ``seconds`` after it was put. Keys hold a hash of the owner and the response's id.
    """

    def __init__(
        self,
        connection: RedisConnection,
        prefix: str,
        most: int,
        most_bytes: int,
        seconds: float,
        observer: StoreObserver | None = None,
    ) -> None:
        self._observer = observer or Unobserved()
        self._values = RedisValues(connection, prefix, "response", seconds, most_bytes, most, observer)

    async def put(self, owner: str, response_id: str, stored: StoredResponse, lease: float | None = None) -> None:
        """As in ResponseStore; what alone is larger than the whole store is not kept."""
        name = _name(owner, response_id)
        with observed(self._observer, "put") as work:
            data = await encode(stored)
            if self._values.fits(data):
                await self._values.put([(name, data)], lease=lease)
            else:
                await self._values.delete([name])
            work.outcome = "ok"

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """As in ResponseStore; what is no response is not there."""
        name, stored = _name(owner, response_id), None
        with observed(self._observer, "get") as work:
            found = await self._values.leading([name])
            if found and (stored := await decode_foreign(found[0])) is None:
                await self._values.discard("get", name)
            work.outcome = "hit" if stored is not None else "miss"
        return stored

    async def delete(self, owner: str, response_id: str) -> bool:
        """As in ResponseStore."""
        count = 0
        with observed(self._observer, "delete") as work:
            count = await self._values.delete([_name(owner, response_id)])
            work.outcome = "ok" if count else "miss"
        return count > 0


def _name(owner: str, response_id: str) -> str:
    return f"{hashlib.blake2b(owner.encode(), digest_size=16).hexdigest()}:{response_id}"
