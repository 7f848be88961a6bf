"""An edge's link to its server: connected whenever it can be."""

from __future__ import annotations

import asyncio
import logging
import random

from speculative.edge.connection import Connection
from speculative.edge.opening import Server, open_connection
from speculative.errors import ServerUnreachableError
from speculative.remote.frames import Hello
from speculative.waiting import ended, set_within

logger = logging.getLogger("moaserve.edge")

FIRST_S, MOST_S, HOPELESS_S = 0.1, 5.0, 30.0
"""Seconds between attempts to connect: they double from FIRST_S to MOST_S; where trying again will hardly help, HOPELESS_S."""

STABLE_S = 2.0
"""A connection that has held so long was a good one: it is made anew at once, and the next attempts begin at FIRST_S again. On a
network that drops it every few seconds longer pauses would leave texts to the drafter while the server is there."""

MOST_CAUSES = 10
"""Causes of failure that are logged between two connections; some have an address in them that is another each time."""


class Link:
    """Keeps a connection to a server, and makes a new one where it is lost.

    ``connection`` is None while cut off, since ``lost_at`` of the loop's clock, and ``problem`` says why.
    """

    def __init__(self, server: Server, hello: Hello) -> None:
        self.server, self._hello = server, hello
        self.connection: Connection | None = None
        self.problem: ServerUnreachableError | None = None
        self.num_connections = 0
        self.lost_at = 0.0
        self._bytes_before = (0, 0)
        self._told: set[str] = set()
        self._changed = asyncio.Event()
        self._tried = asyncio.Event()
        self._known = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        """Whether there is a connection now."""
        return self.connection is not None and not self.connection.lost.done()

    @property
    def bytes_sent(self) -> int:
        """On all connections."""
        return self._bytes_before[0] + (self.connection.bytes_sent if self.connection else 0)

    @property
    def bytes_received(self) -> int:
        """On all connections."""
        return self._bytes_before[1] + (self.connection.bytes_received if self.connection else 0)

    def start(self) -> None:
        """Connect, and stay connected."""
        self.lost_at = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._run())

    async def tried(self) -> None:
        """Return once it is connected for the first time, or the first attempt has failed."""
        await self._tried.wait()

    async def known(self) -> None:
        """As ``tried``, but go on waiting while the server says that it starts."""
        await self._known.wait()

    async def connected(self, patience: float) -> Connection | None:
        """The connection; None if it has not been there for ``patience`` seconds, now or when these are over."""
        loop = asyncio.get_running_loop()
        while not self.up:
            if self.connection is not None:
                await asyncio.sleep(0)  # it has just been lost: since when will be noted at once
                continue
            if (left := self.lost_at + patience - loop.time()) <= 0:
                return None
            self._changed.clear()
            await set_within(self._changed, left)
        return self.connection

    def is_away(self, patience: float) -> bool:
        """Whether there has been no connection for ``patience`` seconds."""
        return self.connection is None and asyncio.get_running_loop().time() >= self.lost_at + patience

    async def close(self) -> None:
        """Hang up for good."""
        if self._task is not None:
            await ended({self._task})
        if self.connection is not None:
            await self.connection.close()
            self._forget(self.connection)

    async def _run(self) -> None:
        loop, attempts = asyncio.get_running_loop(), 0
        while True:
            try:
                connection = await open_connection(self.server, self._hello, known=self.num_connections > 0)
            except ServerUnreachableError as problem:
                self._failed(problem)
                pause = HOPELESS_S if problem.permanent else min(MOST_S, FIRST_S * 2**attempts)
                attempts = min(attempts + 1, 16)
            else:
                began = loop.time()
                self._connected(connection)
                reason = await asyncio.shield(connection.lost)
                self._lost(connection, reason)
                await connection.close()
                attempts = 0 if loop.time() - began > STABLE_S else min(attempts + 1, 16)
                pause = min(MOST_S, FIRST_S * 2**attempts) if attempts else 0.0
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # edges that lost one server do not return as one

    def _connected(self, connection: Connection) -> None:
        self.connection, self.problem = connection, None
        self._told.clear()
        self.num_connections += 1
        model = connection.welcome.model
        logger.info("connected to %s: %s, memory as %s", self.server, model.name, connection.welcome.format)
        self._changed.set()
        self._tried.set()
        self._known.set()

    def _lost(self, connection: Connection, reason: str) -> None:
        self._forget(connection)
        self.problem = ServerUnreachableError(f"cut off from {self.server}: {reason}")
        logger.warning("%s", self.problem)

    def _forget(self, connection: Connection) -> None:
        self.connection, self.lost_at = None, asyncio.get_running_loop().time()
        self._bytes_before = (self._bytes_before[0] + connection.bytes_sent, self._bytes_before[1] + connection.bytes_received)

    def _failed(self, problem: ServerUnreachableError) -> None:
        # Each once until it is connected again, however often it is tried and whichever come in turns.
        if str(problem) not in self._told and len(self._told) < MOST_CAUSES:
            self._told.add(str(problem))
            logger.warning("%s", problem)
        self.problem = problem
        self._tried.set()
        if not problem.starting:
            self._known.set()
