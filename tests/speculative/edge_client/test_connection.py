"""A connection to a server that is played by the test, frame by frame."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Response

from speculative.edge.connection import Connection, ConnectionLostError
from speculative.edge.link import MOST_S, Link
from speculative.edge.opening import Server, open_connection
from speculative.errors import ServerUnreachableError
from speculative.remote.frames import (
    Cancel,
    Closed,
    Error,
    Hello,
    Memory,
    Model,
    Open,
    Ping,
    Pong,
    Sampling,
    ServerFrame,
    ServerLimits,
    Verify,
    Welcome,
)
from speculative.remote.limits import Limits
from speculative.remote.packing import pack_tokens
from speculative.remote.protocol import decode_client, encode

HELLO = Hello((1,), "pair", ("int8",), frame_bytes=2**16)
WELCOME = Welcome(1, "int8", ServerLimits(2**20, 16, 64, 2, 4, 60.0), Model("m", 100, 50, b"", 4, 0))
Play = Callable[[ServerConnection], Awaitable[None]]


async def tell(socket: ServerConnection, *frames: ServerFrame) -> None:
    for frame in frames:
        await socket.send(encode(frame))


async def hear(socket: ServerConnection) -> object:
    """The next frame that is no ping; those are answered."""
    while True:
        data = await socket.recv()
        assert isinstance(data, bytes)
        frame = decode_client(data, Limits())
        if not isinstance(frame, Ping):
            return frame
        await tell(socket, Pong(frame.number))


@asynccontextmanager
async def playing(play: Play, greet: bool = True) -> AsyncIterator[Server]:
    async def run(socket: ServerConnection) -> None:
        assert isinstance(await hear(socket), Hello)
        if greet:
            await tell(socket, WELCOME)
        await play(socket)

    async with serve(run, "127.0.0.1", 0, compression=None, close_timeout=0.1) as server:
        yield Server(f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}")


@asynccontextmanager
async def connected(play: Play) -> AsyncIterator[Connection]:
    async with playing(play) as server:
        connection = await open_connection(server, HELLO)
        try:
            yield connection
        finally:
            await connection.close()


OPEN = Open(0, pack_tokens([1]), Sampling(seed=1))


async def test_sessions_have_numbers_of_their_own_until_they_are_closed() -> None:
    heard: list[object] = []

    async def play(socket: ServerConnection) -> None:
        while len(heard) < 3:
            heard.append(await hear(socket))
        await tell(socket, Memory(1, 0, bytes(4)), Memory(0, 0, bytes(4)), Closed(1, "cancelled"))
        await hear(socket)

    async with connected(play) as connection:
        with await connection.channel() as first:
            with await connection.channel() as second:
                assert (first.number, second.number) == (0, 1)
                first.send(OPEN)
                second.send(Verify(1, 1, 1))
                third = asyncio.create_task(connection.channel())
            assert await first.receive() == Memory(0, 0, bytes(4))
            assert (await third).number == 1, "of the two numbers that there are, it is the one that was closed"
            assert first.bytes_received > 0 and first.bytes_sent > 0
    assert heard == [OPEN, Verify(1, 1, 1), Cancel(1)]


async def test_what_comes_for_a_session_that_was_left_is_dropped_and_its_end_frees_it() -> None:
    async def play(socket: ServerConnection) -> None:
        await hear(socket)
        await tell(socket, Error("overloaded", "full", True, 0))
        await hear(socket)

    async with connected(play) as connection:
        with await connection.channel() as channel:
            channel.send(OPEN)
            assert isinstance(await channel.receive(), Error)
        assert (await connection.channel()).number == 0, "it is over: nothing is to be cancelled"


async def test_a_lost_connection_ends_its_sessions_after_what_came() -> None:
    async def play(socket: ServerConnection) -> None:
        await hear(socket)
        await tell(socket, Memory(0, 0, bytes(4)))
        await socket.close()

    async with connected(play) as connection:
        with await connection.channel() as channel:
            channel.send(OPEN)
            assert isinstance(await channel.receive(), Memory)
            with pytest.raises(ConnectionLostError):
                await channel.receive()
        with pytest.raises(ConnectionLostError):
            await connection.channel()


async def test_round_trips_are_measured_and_silence_is_noticed() -> None:
    async def play(socket: ServerConnection) -> None:
        for _ in range(3):
            data = await socket.recv()
            assert isinstance(data, bytes)
            frame = decode_client(data, Limits())
            assert isinstance(frame, Ping)
            await tell(socket, Pong(frame.number))
        await socket.wait_closed()

    async with connected(play) as connection:
        assert "silent" in await connection.lost
        assert connection.round_trip.smoothed is not None and connection.round_trip.smoothed < 1


@pytest.mark.parametrize("wrong", [b"\xff" * 30, encode(WELCOME), encode(Error("out_of_order", "no")), "text"])
async def test_a_server_that_speaks_otherwise_is_left(wrong: bytes | str) -> None:
    async def play(socket: ServerConnection) -> None:
        await socket.send(wrong)
        await hear(socket)

    async with connected(play) as connection:
        assert await connection.lost


@pytest.mark.parametrize("permanent", [True, False])
async def test_a_refused_greeting_says_what_to_do(permanent: bool) -> None:
    code = "wrong_model" if permanent else "not_ready"

    async def play(socket: ServerConnection) -> None:
        await tell(socket, Error(code, "export the bundle anew", not permanent))

    async with playing(play, greet=False) as server:
        with pytest.raises(ServerUnreachableError, match="export the bundle anew") as caught:
            await open_connection(server, HELLO)
        assert caught.value.permanent is permanent


async def test_a_greeting_that_is_cut_off_is_told_in_plain_words() -> None:
    async def play(socket: ServerConnection) -> None:
        socket.transport.abort()

    async with playing(play, greet=False) as server:
        with pytest.raises(ServerUnreachableError, match="did not answer the greeting: the connection broke off") as caught:
            await open_connection(server, HELLO)
        assert not caught.value.permanent


async def test_where_there_is_no_such_place_a_proxy_may_be_why() -> None:
    async with serve(hear, "127.0.0.1", 0, process_request=lambda connection, _: connection.respond(404, "")) as http:
        server = Server(f"ws://127.0.0.1:{http.sockets[0].getsockname()[1]}")
        with pytest.raises(ServerUnreachableError, match="does a proxy in between pass on `Upgrade`") as caught:
            await open_connection(server, HELLO)
        assert caught.value.permanent


async def test_what_stands_in_the_place_of_a_known_server_may_pass() -> None:
    answers = iter([None, (404, ""), (302, "https://portal.example/login"), None])
    problems: list[ServerUnreachableError | None] = []

    def answer(connection: ServerConnection, _: object) -> Response | None:
        problems.append(link.problem)
        if (answer := next(answers)) is None:
            return None
        status, location = answer
        response = connection.respond(status, "")
        response.headers["Location"] = location
        return response

    async def play(socket: ServerConnection) -> None:
        assert isinstance(await hear(socket), Hello)
        await tell(socket, WELCOME)
        await hear(socket)

    async with serve(play, "127.0.0.1", 0, compression=None, close_timeout=0.1, process_request=answer) as server:
        link = Link(Server(f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"), HELLO)
        link.start()
        first = await link.connected(10)
        assert first is not None
        first.fail("another network")
        assert await link.connected(10) is not None, "it is asked again soon"
        await link.close()
    *_, missing, elsewhere = problems
    assert missing is not None and not missing.permanent and "has no /v1/speculative/sessions" in str(missing)
    assert elsewhere is not None and not elsewhere.permanent
    assert "sends on to https://portal.example/login" in str(elsewhere)


async def test_nobody_there_is_an_error_that_may_pass() -> None:
    async with playing(lambda socket: asyncio.sleep(0)) as server:
        pass
    with pytest.raises(ServerUnreachableError, match="cannot be reached") as caught:
        await open_connection(server, HELLO)
    assert not caught.value.permanent


async def test_a_link_connects_again_and_counts_it() -> None:
    connections = 0

    async def play(socket: ServerConnection) -> None:
        nonlocal connections
        connections += 1
        if connections > 1:
            await hear(socket)

    async with playing(play) as server:
        link = Link(server, HELLO)
        link.start()
        first = await link.connected(10)
        assert first is not None
        await first.lost
        second = await link.connected(10)
        assert second is not None and second is not first and link.num_connections == 2
        assert link.up and link.bytes_received > 0
        await link.close()
        assert not link.up


@pytest.mark.parametrize("statuses", [[502, 503], list(range(405, 418))])
async def test_causes_that_come_in_turns_are_logged_once_until_there_is_a_connection(
    statuses: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("speculative.edge.link.MOST_S", 0.001)
    answers, over = iter([*statuses * 5, None, *statuses * 5]), asyncio.Event()

    def answer(connection: ServerConnection, _: object) -> Response | None:
        status = next(answers, 0)
        if status == 0:
            over.set()
        return None if status is None else connection.respond(status or statuses[0], "")

    async def play(socket: ServerConnection) -> None:
        await hear(socket)
        await tell(socket, WELCOME)

    async with serve(play, "127.0.0.1", 0, compression=None, close_timeout=0.1, process_request=answer) as server:
        link = Link(Server(f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"), HELLO)
        link.start()
        await asyncio.wait_for(over.wait(), 60)
        await link.close()
    causes = [line for line in caplog.messages if "does not take connections now" in line]
    assert len(causes) == 2 * min(len(statuses), 10)


@pytest.mark.parametrize(("held", "longest"), [(0.0, MOST_S), (3.0, 0.0)])
async def test_a_connection_that_has_held_for_seconds_is_made_anew_at_once(
    monkeypatch: pytest.MonkeyPatch, held: float, longest: float
) -> None:
    pauses: list[float] = []

    class Share(float):
        def __rmul__(self, pause: float) -> float:
            pauses.append(pause)
            return 0.0

    monkeypatch.setattr("speculative.edge.link.random.uniform", lambda *_: Share())
    loop, passed = asyncio.get_running_loop(), 0.0
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + passed)
    async with playing(lambda socket: socket.wait_closed()) as server:
        link = Link(server, HELLO)
        link.start()
        for number in range(1, 9):
            while link.num_connections < number:
                await asyncio.sleep(0)
            passed += held
            assert link.connection is not None
            link.connection.fail("gone")
        while len(pauses) < 8:
            await asyncio.sleep(0)
        await link.close()
    assert max(pauses) == longest


async def test_patience_begins_when_a_connection_is_lost_however_long_it_held() -> None:
    async with playing(lambda socket: socket.wait_closed()) as server:
        link = Link(server, HELLO)
        link.start()
        first = await link.connected(10)
        assert first is not None
        link.lost_at -= 1000
        first.fail("gone")
        assert not link.up
        assert await link.connected(10) is not None
        await link.close()
        assert await link.connected(0) is None


@pytest.mark.parametrize(
    "url", ["ws://127.0.0.1:99999", "ws://127.0.0.1:port", f"ws://{'a' * 70}.example:80", "ws://[::1:80", "http://127.0.0.1:80"]
)
async def test_what_is_no_address_is_an_error_that_stays(url: str) -> None:
    link = Link(Server(url), HELLO)
    link.start()
    await asyncio.wait_for(link.tried(), 30)
    assert link.problem is not None and link.problem.permanent and url in str(link.problem)
    await link.close()


async def test_no_message_has_the_password_for_a_proxy_on_the_way() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for address in (f"127.0.0.1:{port}/llm", "127.0.0.1:port"):
        with pytest.raises(ServerUnreachableError) as caught:
            await open_connection(Server(f"ws://me:secret@{address}"), HELLO)
        assert f"ws://{address} " in str(caught.value) and "secret" not in str(caught.value)


async def test_a_proxy_that_takes_another_library_is_an_error_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object, **__: object) -> object:
        raise ImportError("connecting through a SOCKS proxy requires python-socks")

    monkeypatch.setattr("speculative.edge.opening.connect", connect)
    with pytest.raises(ServerUnreachableError, match="requires python-socks") as caught:
        await open_connection(Server("ws://server.example:80"), HELLO)
    assert caught.value.permanent
