"""nginx as docs/self-hosting.md sets it up: WebSockets get through, and of several servers one that can answers."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from http import HTTPStatus
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response

PAGE = (Path(__file__).parents[2] / "docs/self-hosting.md").read_text()
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx")

Start = Callable[..., Awaitable[str]]


@pytest.fixture
async def nginx(tmp_path: Path, unused_tcp_port: int) -> AsyncIterator[Start]:
    """Starts it before servers on these ports, without TLS; where it listens."""
    started: list[subprocess.Popen[bytes]] = []

    async def start(*ports: int) -> str:
        block = re.search(r"```nginx\n(.*?)```", PAGE, re.DOTALL)
        assert block is not None
        text = re.sub(r"^ *ssl_\w+ .*\n", "", block[1], flags=re.MULTILINE)
        text = text.replace("listen 443 ssl;", f"listen 127.0.0.1:{unused_tcp_port};")
        text, count = re.subn("server 127.0.0.1:8000;", " ".join(f"server 127.0.0.1:{port};" for port in ports), text)
        assert count == 1
        folders = "".join(f"{name}_temp_path {tmp_path}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        config, pid, log = (tmp_path / name for name in ("nginx.conf", "pid", "error.log"))
        config.write_text(f"daemon off; pid {pid}; error_log {log};\nevents {{}}\nhttp {{ access_log off;\n{folders}{text}}}\n")
        assert NGINX is not None
        subprocess.run([NGINX, "-t", "-e", log, "-c", config], check=True, capture_output=True)
        started.append(subprocess.Popen([NGINX, "-e", log, "-c", config]))
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(retries=20)) as client:
            assert (await client.get(f"http://127.0.0.1:{unused_tcp_port}/metrics")).status_code == 403
        return f"127.0.0.1:{unused_tcp_port}"

    yield start
    for process in started:
        process.terminate()
        process.wait()


class Servers:
    """Answer plain requests with a status, and WebSockets with what they say."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.asked: list[int] = []
        self._stack = stack

    async def start(self, status: int) -> int:
        """A server's port."""

        async def answer(connection: ServerConnection, request: Request) -> Response | None:
            self.asked.append(status)
            if "Upgrade" in request.headers:
                return None
            assert "Connection" not in request.headers
            return connection.respond(HTTPStatus(status), f"{status}\n")

        async def echo(connection: ServerConnection) -> None:
            async for message in connection:
                await connection.send(message)

        server: Server = await self._stack.enter_async_context(serve(echo, "127.0.0.1", 0, process_request=answer))
        port: int = next(iter(server.sockets)).getsockname()[1]
        return port


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    async with AsyncExitStack() as stack:
        yield Servers(stack)


async def test_edges_come_by_websocket(nginx: Start, servers: Servers) -> None:
    address = await nginx(await servers.start(200))
    async with connect(f"ws://{address}/v1/speculative/sessions") as socket:
        await socket.send(b"frame")
        assert await socket.recv() == b"frame"


async def test_what_one_server_does_not_take_another_does(nginx: Start, servers: Servers) -> None:
    address = await nginx(await servers.start(503), await servers.start(200), await servers.start(503))
    async with httpx.AsyncClient() as client:
        answers = [await client.get(f"http://{address}/v1/models") for _ in range(6)]
    assert [answer.status_code for answer in answers] == [200] * 6
    assert 503 in servers.asked


async def test_what_no_server_takes_is_refused(nginx: Start, servers: Servers) -> None:
    address = await nginx(await servers.start(503), await servers.start(503))
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"http://{address}/v1/models")).status_code in (502, 503)
