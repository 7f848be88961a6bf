"""Stores: where an application keeps sessions, as its settings say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.sessions.blocks import BlockStore
from app.sessions.memory import MemoryStore
from app.sessions.memory_blocks import MemoryBlocks
from app.sessions.observing import StoreObserver
from app.sessions.store import ResponseStore
from app.sessions.writing import WrittenLater
from app.settings import HttpSettings

if TYPE_CHECKING:
    from app.sessions.redis_connection import RedisConnection


REDIS_BYTES = 2**30
"""Of blocks in Redis, unless told otherwise. In memory there are none: the engine keeps what was used last there itself."""


@dataclass(frozen=True, slots=True)
class Stores:
    """Where responses and blocks of key-value cache (None: nowhere) are kept, and the connection to Redis, if it is there."""

    responses: ResponseStore
    blocks: BlockStore | None
    connection: RedisConnection | None = None

    @classmethod
    def of(cls, settings: HttpSettings, observer: StoreObserver) -> Stores:
        """Stores in Redis where ``settings`` name one, else in memory; no connection is made yet."""
        return _in_memory(settings, observer) if settings.redis_url is None else _in_redis(settings, observer)

    def start(self) -> None:
        """See whether Redis is there; nobody waits for it."""
        if self.connection is not None:
            self.connection.start()

    async def close(self) -> None:
        """Write what still waits, as far as that goes within seconds, and hang up."""
        if self.blocks is not None:
            await self.blocks.close()
        if self.connection is not None:
            await self.connection.close()


def _in_memory(settings: HttpSettings, observer: StoreObserver) -> Stores:
    kept = settings.kept_blocks
    return Stores(
        MemoryStore(settings.store_max_responses, settings.store_max_bytes, settings.store_ttl, observer=observer),
        MemoryBlocks(kept.max_bytes, kept.ttl, observer) if kept is not None and kept.max_bytes else None,
    )


def _in_redis(settings: HttpSettings, observer: StoreObserver) -> Stores:
    from app.sessions.redis_blocks import RedisBlocks  # half a second to import, which servers without it can do without
    from app.sessions.redis_connection import RedisConnection
    from app.sessions.redis_responses import RedisResponses

    assert settings.redis_url is not None
    prefix, kept = settings.redis_prefix, settings.kept_blocks
    connection = RedisConnection(settings.redis_url.get_secret_value(), settings.redis_timeout, f"{prefix}:probe", observer)
    responses = RedisResponses(
        connection, prefix, settings.store_max_responses, settings.store_max_bytes, settings.store_ttl, observer
    )
    if kept is None or kept.max_bytes == 0:
        return Stores(responses, None, connection)
    blocks = RedisBlocks(connection, prefix, REDIS_BYTES if kept.max_bytes is None else kept.max_bytes, kept.ttl, observer)
    return Stores(responses, WrittenLater(blocks, observer=observer), connection)
