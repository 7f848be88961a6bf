"""One WebSocket from an edge to a server, and the sessions on it. docs/protocol.md says what is spoken."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from types import TracebackType
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from speculative.edge.measuring import RoundTrip
from speculative.errors import EngineError, ProtocolError
from speculative.remote.frames import Cancel, ClientFrame, Closed, Error, Ping, Pong, ServerFrame, Welcome
from speculative.remote.limits import Limits
from speculative.remote.protocol import decode_server, encode
from speculative.waiting import ended

PING_S = 0.2
PATIENCE_S = 0.6
"""A ping goes out every PING_S. Where nothing has been heard for PATIENCE_S, and PING_S beyond what round trips take of late, the
connection is lost: that is seen a PING_S later at the latest, so within a second on all but the slowest links."""

CLOSING_S = 1.0


class ConnectionLostError(EngineError):
    """The connection is gone; its sessions can be resumed on another."""


class Connection:
    """A WebSocket that has been greeted. ``lost`` is done, with the reason, once it is gone.

    Frames are sent in the order of ``send``, which never waits: an edge has little to say. Each session's frames go to its
    `Channel`.
    """

    def __init__(self, socket: Socket, welcome: Welcome, limits: Limits) -> None:
        self.welcome, self.limits = welcome, limits
        self.round_trip = RoundTrip()
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._socket = socket
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._channels: dict[int, Channel] = {}
        self._freed = asyncio.Event()
        self._pings: deque[tuple[int, float]] = deque()
        self._tasks = [asyncio.create_task(work()) for work in (self._read, self._write, self._watch)]

    @property
    def bytes_sent(self) -> int:
        """All that went up, WebSocket headers included."""
        return self._socket.sent

    @property
    def bytes_received(self) -> int:
        """All that came down."""
        return self._socket.received

    async def channel(self) -> Channel:
        """A session's place, as soon as a number is free; raises ConnectionLostError."""
        while True:
            if self.lost.done():
                raise ConnectionLostError(self.lost.result())
            number = next((number for number in range(self.limits.sessions) if number not in self._channels), None)
            if number is not None:
                channel = self._channels[number] = Channel(self, number)
                return channel
            self._freed.clear()
            await self._freed.wait()

    def send(self, frame: ClientFrame) -> int:
        """Send as soon as the network takes it; how many bytes that are. What is sent on a lost connection is lost."""
        data = encode(frame)
        self._outbox.put_nowait(data)
        return len(data)

    def fail(self, reason: str) -> None:
        """Give the connection up: a peer that has another idea of the protocol, or one that says nothing any more."""
        if not self.lost.done():
            self.lost.set_result(reason)
            self._freed.set()
            for channel in self._channels.values():
                channel.end()
            self._socket.transport.abort()

    async def close(self) -> None:
        """Hang up, once what has been sent is on its way."""
        if not self.lost.done():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._outbox.join(), CLOSING_S)
            with contextlib.suppress(ConnectionClosed, asyncio.TimeoutError, OSError):
                await asyncio.wait_for(self._socket.close(), CLOSING_S)
        self.fail("it was closed")
        await ended(self._tasks)

    def forget(self, number: int) -> None:
        """A session's number is free again."""
        self._channels.pop(number, None)
        self._freed.set()

    async def _read(self) -> None:
        try:
            while True:
                data = await self._socket.recv()
                if isinstance(data, str):
                    return self.fail("the server sent text, which is no frame")
                self._take(decode_server(data, self.limits), len(data))
        except ConnectionClosed as closed:
            self.fail(closed.reason or "the server has hung up" if closed.rcvd else "the connection broke off")
        except ProtocolError as error:
            self.fail(f"the server sent what cannot be used: {error}")

    def _take(self, frame: ServerFrame, size: int) -> None:
        match frame:
            case Pong():
                now = asyncio.get_running_loop().time()
                while self._pings and self._pings[0][0] <= frame.number:
                    number, sent = self._pings.popleft()
                    if number == frame.number:
                        self.round_trip.add(now - sent)
            case Welcome():
                self.fail("the server greeted twice")
            case Error(session=None):
                self.fail(f"{frame.code}: {frame.message}")
            case _:
                assert frame.session is not None
                if (channel := self._channels.get(frame.session)) is not None:
                    channel.deliver(frame, size)

    async def _write(self) -> None:
        with contextlib.suppress(ConnectionClosed):  # the reader knows why
            while True:
                await self._socket.send(self._socket.count(await self._outbox.get()))
                self._outbox.task_done()

    async def _watch(self) -> None:
        """Ping, and give up a connection on which nothing is heard any more."""
        loop = asyncio.get_running_loop()
        for number in range(2**32):
            before = loop.time()
            self._pings.append((number, before))
            self.send(Ping(number))
            await asyncio.sleep(PING_S)
            # What this process has slept through is nobody's silence.
            late = loop.time() - before - PING_S
            trip = self.round_trip
            usual = 0.0 if trip.smoothed is None else trip.smoothed + 4 * trip.deviation
            if loop.time() - self._socket.heard - late > max(PATIENCE_S, PING_S + usual):
                return self.fail("the server has fallen silent")


class Channel:
    """One session's place on a connection. Leaving its context ends the session there, and gives back its number."""

    def __init__(self, connection: Connection, number: int) -> None:
        self.connection, self.number = connection, number
        self.bytes_sent = self.bytes_received = 0
        self._frames: asyncio.Queue[ServerFrame | None] = asyncio.Queue()
        self._begun = self._over = self._left = False

    def send(self, frame: ClientFrame) -> None:
        """As `Connection.send`."""
        self._begun = True
        self.bytes_sent += self.connection.send(frame)

    @property
    def has_news(self) -> bool:
        """Whether ``receive`` would not wait."""
        return not self._frames.empty()

    async def receive(self) -> ServerFrame:
        """The next frame; raises ConnectionLostError after the last."""
        frame = await self._frames.get()
        if frame is None:
            raise ConnectionLostError(self.connection.lost.result())
        return frame

    def deliver(self, frame: ServerFrame, size: int) -> None:
        """Take a frame of this session's; once it has been left they are dropped, as they crossed its end."""
        self.bytes_received += size
        if isinstance(frame, Closed) or (isinstance(frame, Error) and frame.step is None):
            self._over = True
            self.connection.forget(self.number)
        if not self._left:
            self._frames.put_nowait(frame)

    def end(self) -> None:
        """The connection is lost: nothing comes after what has come."""
        self._frames.put_nowait(None)

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._left = True
        if not self._begun:
            self.connection.forget(self.number)
        elif not self._over and not self.connection.lost.done():
            self.send(Cancel(self.number))


class Socket(ClientConnection):
    """Knows when the server was last heard, which a large frame that takes seconds would hide, and counts bytes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.heard = self.loop.time()
        self.received = self.sent = 0

    def data_received(self, data: bytes) -> None:
        """As in asyncio.Protocol."""
        self.heard = self.loop.time()
        self.received += len(data)
        super().data_received(data)

    def count(self, data: bytes) -> bytes:
        """What is about to be sent; a frame's header and mask have 6 bytes, and more for more than 125."""
        self.sent += len(data) + (6 if len(data) <= 125 else 8 if len(data) < 2**16 else 14)
        return data
