"""RedisValues: sealed values of one kind, with a time to live and limits that all servers on the same Redis share."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from redis.exceptions import RedisError

from app.sessions.observing import Operation, StoreObserver, StoreUnavailableError, Unobserved
from app.sessions.off_loop import off_loop
from app.sessions.redis_connection import WRITE_PATIENCE, Client, RedisConnection
from app.sessions.redis_scripts import DELETE, PUT, USE
from app.sessions.sealing import FORMAT, HEAD, OVERHEAD, seal, unseal

LONGEST_TTL_S: Final = 10 * 365 * 24 * 3600
CHUNK_BYTES: Final = 4 * 2**20
COMPLAINT_EVERY_S: Final = 60.0
NO_LIMIT: Final = 2**53

logger = logging.getLogger("moaserve.sessions")


@dataclass(slots=True)
class Row:
    """Values that are used together count as used at one time (Redis's, in µs; 0: not yet known), however many questions it takes.

    Among them a later place counts as a little earlier, so that the end of a row is forgotten before its beginning.
    """

    used_at: int = 0


class RedisValues:
    """Values under ``prefix:1:kind:NAME``, each kept for ``seconds``, up to ``most_bytes`` bytes (headers included) and ``most``.

    Names may have an owner, in hexadecimal before a colon: where there is no room, the longest unused of the one that has most give
    way, by what a sample says of that.

    All methods raise StoreUnavailableError. A value that is not ours, not whole or of another format is counted as corrupt,
    deleted, and not there.
    """

    def __init__(
        self,
        connection: RedisConnection,
        prefix: str,
        kind: str,
        seconds: float,
        most_bytes: int,
        most: int = NO_LIMIT,
        observer: StoreObserver | None = None,
    ) -> None:
        self._connection, self._most_bytes, self._most = connection, most_bytes, most
        self._observer = observer or Unobserved()
        self._kind = kind
        self._prefix = f"{prefix}:{FORMAT}:{kind}:".encode()
        self._notes = [f"{prefix}:{FORMAT}:{kind}s:{each}".encode() for each in ("ends", "sizes")]
        self._ttl_ms = max(1, int(min(seconds, LONGEST_TTL_S) * 1000))
        self._complained_at = -COMPLAINT_EVERY_S

    async def leading(
        self,
        names: Sequence[str],
        row: Row | None = None,
        place: int = 0,
        patience: float | None = None,
        *,
        lenient: bool = False,
    ) -> list[bytes]:
        """The values of the leading names that are there, in one round trip.

        With a ``row``, in which the names stand at ``place`` and behind, their times to live begin anew. ``patience`` and
        ``lenient`` are those of `RedisConnection.read`.
        """
        keys = self._keys(names)

        async def ask(client: Client) -> list[bytes | None]:
            asked = client.pipeline(transaction=False)
            asked.mget(keys)
            if row is not None:
                self._script(asked, USE, keys, [row.used_at, place, 1, HEAD])
            values, *used = await asked.execute(raise_on_error=False)
            if isinstance(values, RedisError):
                raise values
            if row is not None and not isinstance(used[0], RedisError):  # it fails where Redis is full or read-only: be it so
                row.used_at = used[0][0]
            return list(values)

        values = await self._connection.read(ask, patience, lenient=lenient)
        found = values[: values.index(None)] if None in values else values
        size = sum(len(value or b"") for value in found)
        payloads = await off_loop(size, lambda: [unseal(key, value or b"") for key, value in zip(keys, found, strict=False)])
        whole: list[bytes] = []
        for key, payload in zip(keys, payloads, strict=False):
            if payload is None:
                await self._discard("get", key)
                break
            whole.append(payload)
        self._observer.carried("read", sum(map(len, whole)))
        return whole

    async def used(self, names: Sequence[str], row: Row, place: int = 0) -> list[bool]:
        """Let the times to live of values begin anew; which of them are there."""
        keys = self._keys(names)
        used = await self._connection.write(lambda client: self._script(client, USE, keys, [row.used_at, place, 0, HEAD]))
        row.used_at, *there = used
        return [bool(each) for each in there]

    async def put(
        self, values: Sequence[tuple[str, bytes]], row: Row | None = None, place: int = 0, lease: float | None = None
    ) -> None:
        """Keep values, in place of what was there, all of them at once, ``lease`` seconds at most; the longest unused give way."""
        keys = self._keys([name for name, _ in values])
        payloads = [payload for _, payload in values]
        size = sum(map(len, payloads))
        sealed = await off_loop(size, lambda: [seal(key, payload) for key, payload in zip(keys, payloads, strict=True)])
        row = row or Row()
        ends_ms = self._ttl_ms if lease is None else min(self._ttl_ms, max(1, int(lease * 1000)))
        arguments = [row.used_at, place, self._most_bytes, self._most, ends_ms, *sealed]
        row.used_at = await self._connection.write(
            lambda client: self._script(client, PUT, keys, arguments),
            self._connection.timeout * WRITE_PATIENCE * max(1, size / CHUNK_BYTES),
        )
        self._observer.carried("written", size)

    async def delete(self, names: Sequence[str]) -> int:
        """Forget values; how many were there."""
        keys = self._keys(names)
        return int(await self._connection.write(lambda client: self._script(client, DELETE, keys, [HEAD])))

    async def discard(self, operation: Operation, name: str) -> None:
        """Treat a value that is whole, but none of what is kept here, as one that is damaged."""
        (key,) = self._keys([name])
        await self._discard(operation, key)

    def fits(self, payload: bytes) -> bool:
        """Whether a value could be kept at all."""
        return self._most > 0 and len(payload) + OVERHEAD <= self._most_bytes

    def _keys(self, names: Sequence[str]) -> list[bytes]:
        # A name may come from a request, with halves of surrogate pairs in it.
        return [self._prefix + name.encode(errors="surrogatepass") for name in names]

    def _script(self, client: Client, script: str, keys: Sequence[bytes], arguments: Sequence[Any]) -> Any:
        """Run a script. Redis knows one it has seen by its text: sending it takes a microsecond, and no restart can lose it."""
        every = [*self._notes, *keys]
        return client.execute_command("EVAL", script, len(every), *every, self._prefix, self._ttl_ms, *arguments)

    async def _discard(self, operation: Operation, key: bytes) -> None:
        self._observer.ended(operation, "corrupt")
        if time.monotonic() - self._complained_at >= COMPLAINT_EVERY_S:
            self._complained_at = time.monotonic()
            logger.warning(
                "a stored %s in Redis is damaged or not ours: it is deleted (told once in %d s)", self._kind, COMPLAINT_EVERY_S
            )
        with suppress(StoreUnavailableError):
            await self._connection.write(lambda client: self._script(client, DELETE, [key], [HEAD]), self._connection.timeout)
