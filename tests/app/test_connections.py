"""What clients send, as far as uvicorn: bytes over a socket to the application over the engine in memory."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import h11
import httpx
import pytest
import uvicorn
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus

from app import connections
from app.commands.serving import uvicorn_options
from app.connections import FRAGMENT_BYTES, FRAGMENTS, FRAMES, HEAD_BYTES
from app.settings import Settings
from tests.app.fakes import FakeEngine, chat_body

HANDSHAKE = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


class Served:
    """The application behind uvicorn; what is sent to it comes back until it hangs up."""

    def __init__(self, app: Any) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._server = uvicorn.Server(uvicorn.Config(app, **uvicorn_options(Settings())))
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def open(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        return reader, writer

    async def said(self, data: bytes) -> bytes:
        reader, writer = await self.open(data)
        try:
            return await asyncio.wait_for(reader.read(), 30)
        finally:
            writer.close()

    async def stop(self) -> None:
        self._server.should_exit = True
        await asyncio.wait_for(self._serving, 30)


@pytest.fixture
async def served(app: Any) -> AsyncIterator[Served]:
    served = Served(app)
    yield served
    await served.stop()


def post(body: dict[str, Any], *headers: str, version: str = "1.1", path: str = "/v1/chat/completions") -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: test", "Content-Type: application/json", f"Content-Length: {len(content)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + content


def status(said: bytes) -> int:
    return int(said.split()[1])


def error(said: bytes) -> tuple[int, str]:
    body = json.loads(said.partition(b"\r\n\r\n")[2])["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return status(said), body["code"]


@pytest.mark.parametrize(
    "upgrade", ["Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__", HANDSHAKE.strip()]
)
async def test_who_would_rather_speak_another_protocol_is_answered_in_this_one(served: Served, upgrade: str) -> None:
    reader, writer = await served.open(post(chat_body(), *upgrade.split("\r\n")))
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    assert status(head) == 200
    writer.close()


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        ("GET /v1/models HTTP/1.1\r\nHost: test\r\nContent-Length: 2\r\n" + HANDSHAKE + "\r\nhi", 200),
        ("GET /v1/x HTTP/1.1\r\nHost: test\r\n" + HANDSHAKE + "X: y\r\n" * 200 + "\r\n", 431),
        (f"GET /{'x' * 10_000} HTTP/1.1\r\nHost: test\r\n{HANDSHAKE}\r\n", 414),
    ],
    ids=["with a body", "with many headers", "with a long path"],
)
async def test_what_websockets_do_not_take_for_a_handshake_is_answered(served: Served, request_: str, answer: int) -> None:
    reader, writer = await served.open(request_.encode())
    assert status(await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)) == answer
    writer.close()


async def test_a_websocket_without_a_route_is_a_404_like_any_other(
    served: Served, app: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(InvalidStatus) as refused:
        await connect(f"ws://127.0.0.1:{served.port}/v1/nowhere")
    assert refused.value.response.status_code == 404
    assert refused.value.response.body is not None
    assert json.loads(refused.value.response.body)["error"]["code"] == "not_found"
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}") as client:
        assert 'request_errors_total{code="not_found",model_name="tiny",status="404"} 1.0' in (await client.get("/metrics")).text
    logged = [record.getMessage() for record in caplog.records]
    assert any(line.startswith("GET '/v1/nowhere' 404 ") for line in logged)
    assert "uvicorn.error" not in {record.name for record in caplog.records if record.levelno > logging.INFO}


async def test_headers_end(served: Served) -> None:
    reader, writer = await served.open(b"GET /health HTTP/1.1\r\nHost: test\r\nX: ")
    sent = 0
    while not reader.at_eof() and sent < 100 * HEAD_BYTES:
        writer.write(b"x" * HEAD_BYTES)
        sent += HEAD_BYTES
        try:
            await writer.drain()
        except ConnectionError:
            break
        await asyncio.sleep(0)
    assert sent < 100 * HEAD_BYTES
    writer.close()
    assert error(await served.said(b"GET /health HTTP/1.1\r\nX: " + b"x" * (HEAD_BYTES + 1))) == (400, "invalid_value")


async def test_http_1_0_gets_its_stream_as_it_is(served: Served) -> None:
    said = await served.said(post(chat_body(stream=True), version="1.0"))
    head, _, body = said.partition(b"\r\n\r\n")
    assert status(head) == 200
    assert b"transfer-encoding" not in head.lower()
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


async def test_requests_one_behind_the_other_are_answered_in_turn(served: Served) -> None:
    close = b"GET http://test/v1/models?a=b HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"
    said = await served.said(post(chat_body()) + post(chat_body(stream=True)) + close)
    assert said.count(b"HTTP/1.1 200 OK") == 3
    assert said.index(b'"chat.completion"') < said.index(b"data: [DONE]\n\n\r\n0\r\n\r\n") < said.index(b'"list"')


async def test_a_body_in_many_chunks_is_taken_whole_and_holds_nobody_up(served: Served) -> None:
    head, _, body = post(chat_body()).replace(b"Content-Length", b"X-Length").partition(b"\r\n\r\n")
    head += b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    close = b"GET /v1/models HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n"
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in b" " * 64 * 1024 + body)
    many = asyncio.create_task(served.said(head + chunks + b"0\r\n\r\n" + close))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}") as client:
        assert (await client.get("/health")).is_success
        assert not many.done()
    said = await many
    assert said.count(b"HTTP/1.1 200 OK") == 2
    assert said.index(b'"chat.completion"') < said.index(b'"list"')


async def test_a_handshake_of_some_size_is_answered(served: Served) -> None:
    with pytest.raises(InvalidStatus) as refused:
        await connect(f"ws://127.0.0.1:{served.port}/v1/nowhere", additional_headers={f"X-{n}": "x" * 2048 for n in range(16)})
    assert refused.value.response.status_code == 404


async def test_who_waits_to_be_told_to_go_on_is(served: Served) -> None:
    head, _, body = post(chat_body(), "Expect: 100-continue", "Connection: close").partition(b"\r\n\r\n")
    reader, writer = await served.open(head + b"\r\n\r\n")
    assert status(await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)) == 100
    writer.write(body)
    assert status(await asyncio.wait_for(reader.read(), 30)) == 200
    writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHo", post(chat_body())[:-1]])
async def test_what_does_not_arrive_is_not_waited_for(served: Served, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connections, "ARRIVAL_S", {h11.IDLE: 0.1, h11.SEND_BODY: 0.1})
    said = await served.said(sent)
    if sent:
        assert error(said) == (408, "request_timeout")
    else:
        assert said == b""


async def test_nor_is_what_does_not_arrive_after_an_answer(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ARRIVAL_S", {h11.IDLE: 0.1})
    reader, writer = await served.open(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n")
    await asyncio.wait_for(reader.readuntil(b'"}'), 30)
    writer.write(b"GET")
    assert error(await asyncio.wait_for(reader.read(), 30)) == (408, "request_timeout")
    writer.close()


async def test_an_answer_that_takes_long_is_no_request_that_does(
    served: Served, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "ARRIVAL_S", {h11.IDLE: 0.01, h11.SEND_BODY: 0.01})
    engine.hang = True
    reader, writer = await served.open(post(chat_body(stream=True)))
    await asyncio.wait_for(engine.hanging.acquire(), 30)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(reader.readuntil(b"[DONE]"), 0.2)
    assert engine.aborted == []
    writer.close()


async def test_stopping_waits_for_no_request_that_has_not_arrived(app: Any) -> None:
    served = Served(app)
    open_ = [
        await served.open(data)
        for data in (
            b"",
            b"GET /health HT",
            post(chat_body())[:-1],
            b"GET /v1/x HTTP/1.1\r\nHost: test\r\n" + HANDSHAKE.encode() + b"X: y\r\n" * 200 + b"\r\n",
        )
    ]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}") as client:
        assert (await client.get("/health")).status_code == 200  # by now all of it is there
    await served.stop()
    said = [await reader.read() for reader, _ in open_]
    assert said[:2] == [b"", b""]
    assert error(said[2]) == (503, "service_unavailable")
    assert status(said[3]) == 431
    for _, writer in open_:
        writer.close()


TEXT, BINARY, CONTINUED, PING, PONG = 0x81, 0x82, 0x00, 0x89, 0x8A


def frame(kind: int, data: bytes = b"") -> bytes:
    """A client's frame, whose mask of zeros changes nothing."""
    size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xff" + struct.pack("!Q", len(data))
    return bytes([kind]) + size + bytes(4) + data


Messages = Callable[[], Awaitable[bytes | None]]
Tell = Callable[[bytes], Awaitable[None]]


class Listening:
    """An application for WebSockets, which ``hears`` one's messages, None when they end; over HTTP it says that it is there."""

    def __init__(self, hears: Callable[[Messages, Tell], Awaitable[None]]) -> None:
        self._hears = hears
        self.asked, self.accepts = asyncio.Event(), asyncio.Event()
        self.accepts.set()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for step in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{step}.complete"})
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})
        else:
            await receive()
            self.asked.set()
            await self.accepts.wait()
            await send({"type": "websocket.accept"})
            await self._hears(lambda: self._next(receive), lambda data: send({"type": "websocket.send", "bytes": data}))

    async def _next(self, receive: Any) -> bytes | None:
        message = await receive()
        return message.get("bytes") if message["type"] == "websocket.receive" else None


async def echo(messages: Messages, tell: Tell) -> None:
    while (message := await messages()) is not None:
        await tell(message)


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[Served]:
    served = Served(app)
    try:
        yield served
    finally:
        await served.stop()


async def upgraded(served: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await served.open(f"GET / HTTP/1.1\r\nHost: test\r\n{HANDSHAKE}\r\n".encode())
    assert status(await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)) == 101
    return reader, writer


@pytest.mark.parametrize("kind", [BINARY, PING, PONG], ids=["messages", "pings", "pongs"])
async def test_frames_leave_others_their_turns(kind: int) -> None:
    turns, heard = 0, []

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def hear(messages: Messages, tell: Tell) -> None:
        while (message := await messages()) is not None:
            if message:
                heard.append((message, turns))
                await tell(message)

    async with serving(Listening(hear)) as served:
        reader, writer = await upgraded(served)
        counting = asyncio.create_task(count())
        writer.write(frame(BINARY, b"first") + 100 * FRAMES * frame(kind) + frame(BINARY, b"last"))
        await asyncio.wait_for(reader.readuntil(b"last"), 30)
        counting.cancel()
        writer.close()
    (first, began), (last, ended) = heard
    assert (first, last) == (b"first", b"last")
    assert ended - began >= 100


async def test_all_messages_come_in_order_whenever_the_application_takes_them() -> None:
    opened, heard = asyncio.Event(), []

    async def hear(messages: Messages, tell: Tell) -> None:
        await opened.wait()
        while (message := await messages()) is not None:
            heard.append(message)
            if message == b"end":
                await tell(message)

    async with serving(Listening(hear)) as served:
        reader, writer = await upgraded(served)
        sent = [str(number).encode() for number in range(20_000)] + [b"x" * 2**20, b"y" * 200, b"end"]
        writer.write(b"".join(frame(BINARY, message) + frame(PONG) for message in sent))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}") as client:
            assert (await client.get("/")).status_code == 204  # by now some of them are there
        opened.set()
        await asyncio.wait_for(reader.readuntil(b"end"), 30)
        assert heard == sent
        writer.write(frame(0x88, struct.pack("!H", 1000)))
        assert await asyncio.wait_for(reader.read(), 30) == b"\x88\x02" + struct.pack("!H", 1000)
        writer.close()


async def test_a_message_in_crumbs_ends_the_connection() -> None:
    async with (
        serving(Listening(echo)) as served,
        connect(f"ws://127.0.0.1:{served.port}", compression=None, max_size=None) as client,
    ):
        large = [b"x" * FRAGMENT_BYTES] * (2 * FRAGMENTS)
        for fragments in ([b""] * FRAGMENTS, large, [b""] * FRAGMENTS):
            await client.send(fragments)
            assert await asyncio.wait_for(client.recv(), 30) == b"".join(fragments)
        with pytest.raises(ConnectionClosedError) as closed:
            await client.send([b""] * (FRAGMENTS + 1))
            await asyncio.wait_for(client.recv(), 30)
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, str(FRAGMENTS) in closed.value.rcvd.reason) == (1008, True)


async def test_of_pings_whose_answers_are_not_read_the_last_is_answered() -> None:
    much = 2**25

    async def hear(messages: Messages, tell: Tell) -> None:
        await messages()
        await tell(bytes(much))  # more than anything between the two keeps
        await messages()
        pinged.set()
        await messages()

    pinged = asyncio.Event()
    async with serving(Listening(hear)) as served:
        reader, writer = await upgraded(served)
        writer.write(frame(BINARY, b"begin"))
        await asyncio.wait_for(reader.readexactly(10), 30)
        writer.write(b"".join(frame(PING, b"%04d" % number) for number in range(1000)) + frame(BINARY, b"done"))
        await asyncio.wait_for(pinged.wait(), 30)
        await asyncio.wait_for(reader.readexactly(much), 30)
        assert await asyncio.wait_for(reader.readexactly(6), 30) == b"\x8a\x040999"
        writer.write(frame(0x88))
        assert await asyncio.wait_for(reader.read(), 30) == b"\x88\x00"
        writer.close()


@pytest.mark.parametrize(
    ("early", "answer"),
    [
        (frame(PING, b"early"), b"\x8a\x05early"),
        (frame(0x02) + FRAGMENTS * frame(CONTINUED), b"\x88"),
        (frame(TEXT, b"\xff"), b"\x88"),
        (b"\x82\x00", b"\x88"),
    ],
    ids=["a ping", "crumbs", "no text", "no mask"],
)
async def test_who_speaks_before_the_handshake_is_answered_is_heard_after_it(
    early: bytes, answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    listening = Listening(echo)
    listening.accepts.clear()
    async with serving(listening) as served:
        reader, writer = await served.open(f"GET / HTTP/1.1\r\nHost: test\r\n{HANDSHAKE}\r\n".encode())
        await asyncio.wait_for(listening.asked.wait(), 30)
        writer.write(early)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{served.port}") as client:
            assert (await client.get("/")).status_code == 204  # by now it is there
        listening.accepts.set()
        assert status(await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)) == 101
        assert await asyncio.wait_for(reader.readexactly(len(answer)), 30) == answer
        writer.close()
    assert not [record for record in caplog.records if record.name == "asyncio"]
