"""RedisConnection: a Redis that may be slow, full, away or frozen at any time, and that no request waits for in vain."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, ReadOnlyError, RedisError, ResponseError

from app.sessions.observing import StoreObserver, StoreUnavailableError, Unobserved
from app.sessions.redis_url import connection_pool, shown

T = TypeVar("T")
Client = Any  # redis.asyncio.Redis: its commands are annotated for both its synchronous and its asynchronous variant

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
WRITE_PATIENCE: Final = 4
"""How many times as long as a read a write may take."""
LATE: Final = 1.2
"""A timeout that comes so many times as late as it was to come is no timeout."""
CONNECTIONS: Final = 32
CLOSING_S: Final = 1.0
IDLE_S: Final = 10.0
"""Seconds without a question after which one is asked all the same: also a server that nobody uses is to say that Redis is away."""

logger = logging.getLogger("moaserve.sessions")


class RedisConnection:
    """Asks Redis, with a limit to the time that takes, and asks nothing while it is known to be away.

    What fails or takes longer than ``timeout`` seconds means that Redis is away. Then nobody asks it but one probe, after pauses
    of 0.1 to 5 seconds that double until something has worked; so requests lose a timeout now and then, and not one each. A Redis
    that answers but refuses to write (full, read-only, not permitted) is still read, and asked to write again after such pauses; of
    one that is read-only all connections are made anew. ``probe`` is a key that the probe reads.
    """

    def __init__(self, url: str, timeout: float, probe: str, observer: StoreObserver | None = None) -> None:
        self.timeout = timeout
        self._where = shown(url)
        self._probe = probe
        self._observer = observer or Unobserved()
        self._pool = connection_pool(
            url,
            protocol=2,
            max_connections=CONNECTIONS,
            timeout=None,
            retry=Retry(NoBackoff(), 1, (ConnectionError,)),  # a connection that was hung up on shows only when it is used
            socket_timeout=None,  # every question has its own limit
            socket_connect_timeout=timeout,
        )
        self._client: Client = Redis(connection_pool=self._pool)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._reachable: bool | None = None  # None: it has not been asked yet
        self._losses = 0
        self._asked = time.monotonic()
        self._pause = FIRST_PAUSE_S
        self._closed = False
        self._refusal: str | None = None
        self._write_pause = FIRST_PAUSE_S
        self._write_again = 0.0

    def start(self) -> None:
        """See whether Redis is there, and from then on whether it still is, without waiting for it."""
        self._spawn(self._first_contact())
        self._spawn(self._keep_looking())

    async def read(self, ask: Callable[[Client], Awaitable[T]], patience: float | None = None, *, lenient: bool = False) -> T:
        """What ``ask`` brings from Redis within ``patience`` seconds (default: the timeout).

        Raises StoreUnavailableError. ``lenient``: running out of time does not mean that Redis is away.
        """
        self._check_reachable()
        return await self._ask(ask, self.timeout if patience is None else patience, lenient=lenient)

    async def write(self, ask: Callable[[Client], Awaitable[T]], patience: float | None = None) -> T:
        """The same for what changes something; by default it may take four times as long."""
        self._check_reachable()
        if self._refusal is not None and time.monotonic() < self._write_again:
            raise StoreUnavailableError(f"Redis takes nothing: {self._refusal}", tried=False)
        result = await self._ask(ask, self.timeout * WRITE_PATIENCE if patience is None else patience, writing=True)
        if self._refusal is not None:
            logger.info("Redis at %s takes new values again", self._where)
            self._refusal, self._write_pause = None, FIRST_PAUSE_S
        return result

    async def close(self) -> None:
        """End what is under way, and hang up."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSING_S)
        hanging_up = asyncio.ensure_future(self._pool.aclose())
        await asyncio.wait([hanging_up], timeout=CLOSING_S)
        if hanging_up.done() and not hanging_up.cancelled() and (error := hanging_up.exception()):
            logger.debug("hanging up on Redis: %s", error)

    def _check_reachable(self) -> None:
        if self._closed or self._reachable is False:
            raise StoreUnavailableError("Redis is away", tried=False)

    async def _ask(
        self, ask: Callable[[Client], Awaitable[T]], patience: float, *, lenient: bool = False, writing: bool = False
    ) -> T:
        """Run ``ask`` in a task of its own: whoever gives up waiting, redis-py then still puts its connection in order."""
        losses, began = self._losses, time.monotonic()
        self._asked = began
        task: asyncio.Task[T] = self._spawn(_awaited(ask, self._client))
        try:
            await asyncio.wait([task], timeout=patience)
            if time.monotonic() - began > patience * LATE:  # this server was held up itself: that says nothing of Redis
                await asyncio.wait([task], timeout=patience)
        finally:
            in_time = task.done()
            task.cancel()
        if not in_time:
            if not lenient:
                self._lose(f"no answer within {patience:g} s", losses)
            raise StoreUnavailableError("Redis took too long", tried=True)
        try:
            result = task.result()
        except asyncio.CancelledError:
            raise StoreUnavailableError("the connection is being closed", tried=True) from None
        except Exception as error:
            if writing and isinstance(error, ResponseError):
                self._find()
                self._be_refused(error)
                if isinstance(error, ReadOnlyError) or "READONLY" in str(error):  # up to Redis 6 in an error of the script
                    await self._hang_up()
            else:
                self._lose(_worded(error), losses)
            raise StoreUnavailableError(_worded(error), tried=True) from error
        if losses == self._losses:
            self._find()
            self._pause = FIRST_PAUSE_S
        return result

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        """A task that carries no request's id into the log, and whose failure nobody has to look at."""
        task: asyncio.Task[Any] = contextvars.Context().run(asyncio.get_running_loop().create_task, work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _first_contact(self) -> None:
        if self._reachable is None:
            with suppress(StoreUnavailableError):
                await self._ask(self._look, self.timeout)

    async def _keep_looking(self) -> None:
        """Ask where nobody else has for a while; whether Redis is back is another's to see."""
        while True:
            await asyncio.sleep(self._asked + IDLE_S - time.monotonic())
            if not self._reachable:
                self._asked = time.monotonic()
            elif time.monotonic() - self._asked >= IDLE_S:
                with suppress(StoreUnavailableError):
                    await self._ask(self._look, self.timeout)

    async def _look(self, client: Client) -> None:
        """Read as requests do: that tells of a database that is still loading, and of what the user may not read."""
        await client.mget([self._probe])

    def _find(self) -> None:
        if self._reachable is not True and not self._closed:
            logger.info("Redis at %s is there: sessions are kept in it", self._where)
            self._reachable = True
            self._observer.reachable(True)

    def _lose(self, reason: str, losses: int) -> None:
        """Redis is away, as one says who asked after ``losses`` earlier losses; what was asked before the last says nothing."""
        if losses != self._losses or self._closed:
            return
        logger.warning("Redis at %s is away (%s): until it is back, nothing is found or kept there", self._where, reason)
        self._losses += 1
        self._reachable = False
        self._observer.reachable(False)
        self._spawn(self._wait_for_return())

    async def _wait_for_return(self) -> None:
        while True:
            await asyncio.sleep(self._pause * random.uniform(0.5, 1))  # servers that lost it together do not return together
            self._pause = min(self._pause * 2, LONGEST_PAUSE_S)
            look = self._spawn(self._look(self._client))
            await asyncio.wait([look], timeout=self.timeout)
            if look.done() and not look.cancelled() and look.exception() is None:
                self._find()
                return
            look.cancel()

    def _be_refused(self, error: ResponseError) -> None:
        if self._refusal is None:
            logger.warning("Redis at %s takes no new values (%s): they are not kept", self._where, _worded(error))
        self._refusal = _worded(error)
        self._write_again = time.monotonic() + self._write_pause
        self._write_pause = min(self._write_pause * 2, LONGEST_PAUSE_S)

    async def _hang_up(self) -> None:
        """Have all be asked by new connections, also what is under way.

        Where another server has become the master, a proxy sends new connections there and leaves old ones where they are.
        """
        with suppress(RedisError):
            await self._pool.disconnect(inuse_connections=True)


async def _awaited(ask: Callable[[Client], Awaitable[T]], client: Client) -> T:
    return await ask(client)


def _worded(error: Exception) -> str:
    """An error in a line. redis-py's own words for pipelines quote the command, and so values: they are left out."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if not text.startswith("Command #") else type(error).__name__
