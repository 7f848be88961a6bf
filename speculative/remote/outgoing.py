"""What a server sends on one connection: one frame after the other, none too long, and no more of them than its peer reads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator

from speculative.errors import ProtocolError
from speculative.remote.frames import Hello, ServerFrame
from speculative.remote.protocol import encode
from speculative.remote.splitting import split

MOST_WAITING = 2**20
"""Bytes that wait for the peer to read; beyond, nothing more is read of what it sends and no text of its goes on."""


class Outgoing:
    """Frames on their way to an edge; ``sent`` is told how many bytes of each have been handed on.

    ``run`` sends until ``finish`` has been called and all is sent, or the connection is lost.
    """

    def __init__(self, send: Callable[[bytes], Awaitable[None]], sent: Callable[[int], None]) -> None:
        self._send, self._sent = send, sent
        self._padding, self._most, self._row_bytes = 0, 2**16, 0
        self._waiting: deque[bytes] = deque()
        self._urgent: deque[bytes] = deque()
        self._size = 0
        self._more = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._finishing = self._lost = False

    def agreed(self, hello: Hello, row_bytes: int) -> None:
        """From now on frames are as this peer takes them."""
        padding = hello.padding if hello.padding > 1 else 1
        self._padding, self._most, self._row_bytes = hello.padding, hello.frame_bytes // padding * padding, row_bytes

    def put(self, frame: ServerFrame) -> None:
        """Send a frame behind those that wait; a lost connection takes it and does nothing."""
        self._queue(self._waiting, frame)

    def put_urgent(self, frame: ServerFrame) -> None:
        """Send a frame ahead of those that wait."""
        self._queue(self._urgent, frame)

    def _queue(self, waiting: deque[bytes], frame: ServerFrame) -> None:
        if not self._lost:
            for data in self._encoded(frame):
                self._size += len(data)
                waiting.append(data)
            self._more.set()
            if self._size > MOST_WAITING:
                self._room.clear()

    @property
    def has_room(self) -> bool:
        """Whether more may be put without need to wait."""
        return self._room.is_set()

    async def room(self) -> None:
        """Return once the peer has read enough, or is lost."""
        await self._room.wait()

    def finish(self) -> None:
        """Let ``run`` return when all is sent."""
        self._finishing = True
        self._more.set()

    async def run(self) -> None:
        """Send what there is; raises what ``send`` raises."""
        try:
            while True:
                while waiting := self._urgent or self._waiting:
                    data = waiting.popleft()
                    await self._send(data)
                    self._sent(len(data))
                    self._size -= len(data)
                    if self._size <= MOST_WAITING:
                        self._room.set()
                if self._finishing:
                    return
                self._more.clear()
                await self._more.wait()
        finally:
            self._lost = True
            self._waiting.clear()
            self._urgent.clear()
            self._room.set()

    def _encoded(self, frame: ServerFrame) -> Iterator[bytes]:
        data = encode(frame, self._padding)
        if len(data) <= self._most:
            yield data
            return
        halves = split(frame, self._row_bytes)
        if halves is None:
            raise ProtocolError(
                "frame_too_large", f"a frame of {len(data)} bytes cannot be divided, and the edge takes {self._most}"
            )
        for half in halves:
            yield from self._encoded(half)
