"""A network between a client and a Redis server that can be made slow, or dumb, or to lead to another server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


class Proxy:
    """Passes bytes on; what the server answers only after ``delay`` seconds. ``asked`` counts what clients have sent,
    ``answered`` what servers have, passed on already or not.

    New connections go to ``target``; those that are there stay where they are.
    """

    def __init__(self, target: Path) -> None:
        self.delay = 0.0
        self.asked = 0
        self.answered = 0
        self.connections = 0
        self.url = ""
        self.target = target
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        from_server, to_server = await asyncio.open_unix_connection(str(self.target))
        answers = asyncio.create_task(self._pass_on(from_server, writer, answers=True))
        self._tasks.add(answers)
        await self._pass_on(reader, to_server, answers=False)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        try:
            while data := await reader.read(2**20):
                if answers:
                    self.answered += 1
                    await asyncio.sleep(self.delay)
                else:
                    self.asked += 1
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def proxy_to(socket: Path) -> AsyncIterator[Proxy]:
    proxy = Proxy(socket)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
