"""A TCP relay that behaves like a slow network, for where the kernel's own (`namespaces`) cannot be had."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Final

from benchmarks.network.links import Link
from benchmarks.network.pipe import Pipe
from benchmarks.network.traffic import Traffic

WINDOW: Final = 2**18
"""Bytes under way in one direction of a connection; then the sender has to wait."""
_READ: Final = 2**16


class Relay:
    """Passes connections to its own port on to ``target`` (host, port), each over a link of its own: see `pipe` for the model.

    A connection's first bytes leave one round trip after it was accepted, for TCP's handshake. Losses are drawn with ``seed``: the
    same traffic loses the same segments. Timers of the event loop are up to a millisecond late, once in each direction.
    """

    def __init__(self, target: tuple[str, int], link: Link, seed: int = 0) -> None:
        self._target, self._link, self._rng = target, link, random.Random(seed)
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._handlers: set[asyncio.Task[None]] = set()
        self._ended = Traffic()

    async def start(self) -> None:
        """Listen on a free port of this machine."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def num_connections(self) -> int:
        """Those that stand."""
        return len(self._connections)

    @property
    def traffic(self) -> Traffic:
        """What it has been given to carry, since it began."""
        return sum((connection.traffic for connection in self._connections), self._ended)

    def shape(self, link: Link) -> None:
        """Be another link from now on, for connections that stand too."""
        self._link = link
        for connection in self._connections:
            for pipe in connection.pipes:
                pipe.link = link

    async def close(self) -> None:
        """Reset all connections and listen no more."""
        assert self._server is not None
        self._server.close()
        for connection in self._connections:
            connection.abort()
        await asyncio.gather(*self._handlers)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = asyncio.current_task()
        assert self._server is not None and handler is not None
        if not self._server.is_serving():  # it was accepted as the relay closed
            writer.transport.abort()
            return
        begin = asyncio.get_running_loop().time() + self._link.rtt
        connection = _Connection(Pipe(self._link, self._rng, begin), Pipe(self._link, self._rng))
        self._connections.add(connection)
        self._handlers.add(handler)
        try:
            await connection.run(reader, writer, self._target)
        finally:
            self._connections.discard(connection)
            self._handlers.discard(handler)
            self._ended += connection.traffic


class _Connection:
    def __init__(self, up: Pipe, down: Pipe) -> None:
        self.pipes = (up, down)
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._aborted = False

    @property
    def traffic(self) -> Traffic:
        up, down = self.pipes
        return Traffic(up.num_bytes, down.num_bytes, up.num_wire_bytes, down.num_wire_bytes, up.num_lost + down.num_lost)

    def abort(self) -> None:
        """Reset it on both sides."""
        self._aborted = True
        for writer in self._writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()

    async def run(self, from_client: asyncio.StreamReader, client: asyncio.StreamWriter, target: tuple[str, int]) -> None:
        """Until both sides have closed, or one has broken off, which the other is told of."""
        self._writers.append(client)
        try:
            from_server, server = await asyncio.open_connection(*target)
            self._writers.append(server)
            for reader, pipe, writer in zip((from_client, from_server), self.pipes, (server, client), strict=True):
                way = _Way(reader, pipe, writer)
                self._tasks += [asyncio.create_task(way.fill()), asyncio.create_task(way.empty())]
            if self._aborted:
                self.abort()
            ended, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.cancelled() or task.exception() is not None for task in ended):
                self.abort()
        except OSError:
            self.abort()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for writer in self._writers:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()


class _Way:
    """One direction of a connection."""

    def __init__(self, reader: asyncio.StreamReader, pipe: Pipe, writer: asyncio.StreamWriter) -> None:
        self._reader, self._pipe, self._writer = reader, pipe, writer
        self._entered, self._left = asyncio.Event(), asyncio.Event()
        self._clock = asyncio.get_running_loop().time

    async def fill(self) -> None:
        """Until the sender has closed."""
        pipe = self._pipe
        while data := await self._reader.read(_READ):
            pipe.send(self._clock(), data)
            self._entered.set()
            while pipe.queued > WINDOW:
                self._left.clear()
                await self._left.wait()
        pipe.close(self._clock())
        self._entered.set()

    async def empty(self) -> None:
        """Until that has arrived."""
        pipe, writer = self._pipe, self._writer
        while True:
            self._entered.clear()
            for data in pipe.take(self._clock()):
                if not data:
                    writer.write_eof()
                    return
                writer.write(data)
            self._left.set()
            await writer.drain()
            arrival = pipe.next_arrival()
            timeout = None if arrival is None else max(0.0, arrival - self._clock())
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._entered.wait(), timeout)
