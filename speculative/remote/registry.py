"""All sessions of a server, whatever connections they are told on, until they are forgotten."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from speculative.errors import ProtocolError
from speculative.remote.host import Generate, Host
from speculative.remote.line import Line
from speculative.remote.served import ServedSession
from speculative.request import Request

MOST_SESSIONS = 4096
"""Sessions that are kept; of those that have ended the oldest go first."""

SILENT_SECONDS = 3.0
"""How long a text may wait for its edge while others wait for its slot: more than a round trip on a poor network takes."""

LOOK_SECONDS = 0.5
"""How often it is asked whether others wait."""

FLUSH_SECONDS = 2.0
"""What a peer gets to read a last word."""


class Connection(Protocol):
    """What the registry knows of one."""

    def stop(self) -> None:
        """Send what there is, and end."""


class SessionRegistry:
    """Sessions by their resume tokens; those that nobody has come for are forgotten after ``host.idle_seconds``.

    Where requests wait for a slot, those whose edges are silent are forgotten sooner: see `make_way`.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self._sessions: dict[bytes, ServedSession] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: dict[Connection, asyncio.Future[None]] = {}
        self._drains = self._looks = False

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, request: Request, seed: int, row_bytes: int, owner: str, line: Line, generate: Generate) -> ServedSession:
        """Begin a text; raises ProtocolError where there is no room for another session."""
        self.check_open(line.number)
        if len(self._sessions) >= MOST_SESSIONS:
            ended = next((each for each in self._sessions.values() if each.finish_reason is not None), None)
            if ended is None:
                raise ProtocolError("overloaded", f"{MOST_SESSIONS} sessions are kept, and none has ended", session=line.number)
            ended.end("idle")
        session = ServedSession(request, seed, row_bytes, owner, self.host, self._forget)
        self._sessions[session.token] = session
        self.host.observer.session(1)
        self._look_soon()
        task = session.start(line, generate)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return session

    def check_open(self, number: int | None) -> None:
        """Raise ProtocolError while nothing new is begun."""
        if self._drains or not self.host.engine.ready:
            raise ProtocolError("not_ready", "the model is loading, or the server shuts down: try again later", session=number)

    def make_way(self, now: float) -> None:
        """Forget as many texts as requests wait for a slot, of those whose edges have said nothing for SILENT_SECONDS.

        Those that have waited longest go first. Their edges open them anew, and what was computed stands in the prefix cache.
        """
        if not (wanted := self.host.engine.status().num_waiting):
            return
        longest = sorted(self._sessions.values(), key=lambda each: each.silent_for(now), reverse=True)[:wanted]
        for session in longest:
            if session.silent_for(now) > SILENT_SECONDS:
                session.end("idle")

    def find(self, token: bytes, owner: str) -> ServedSession | None:
        """The session of that token, if it is this owner's."""
        session = self._sessions.get(token)
        return session if session is not None and session.owner == owner else None

    def connected(self, connection: Connection) -> None:
        """A connection has come."""
        self._connections[connection] = asyncio.get_running_loop().create_future()
        self.host.observer.connected(1)

    def disconnected(self, connection: Connection) -> None:
        """It has gone."""
        if (gone := self._connections.pop(connection, None)) is not None:
            gone.set_result(None)
            self.host.observer.connected(-1)

    async def drain(self, timeout: float) -> None:
        """Begin nothing new, let texts that somebody listens to end within ``timeout`` seconds, and close."""
        self._drains = True
        for session in list(self._sessions.values()):
            session.orphans_end = True
            if session.line is None:
                session.end("shutdown")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)
        await self.close()

    async def close(self) -> None:
        """End all sessions and connections."""
        self._drains = True
        for session in list(self._sessions.values()):
            session.end("shutdown")
        for connection in list(self._connections):
            connection.stop()
        pending = {*self._tasks, *self._connections.values()}
        if pending:
            await asyncio.wait(pending, timeout=2 * FLUSH_SECONDS)

    def _look_soon(self) -> None:
        if not self._looks and self._sessions:
            self._looks = True
            asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._looks = False
        self.make_way(time.monotonic())
        self._look_soon()

    def _forget(self, session: ServedSession) -> None:
        del self._sessions[session.token]
        self.host.observer.session(-1)
