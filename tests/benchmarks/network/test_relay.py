"""The relay, over real connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from benchmarks.network.links import Link
from benchmarks.network.relay import WINDOW, Relay
from benchmarks.network.traffic import Traffic

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
QUICK = Link("quick", rtt=0.004, rate=400e6, loss=0.05)
FREE = Link("free")


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """What came, until the end; then the end."""
    while data := await reader.read(2**16):
        writer.write(data)
        await writer.drain()
    writer.close()


@asynccontextmanager
async def relayed(link: Link, handler: Handler = echo) -> AsyncIterator[Relay]:
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    relay = Relay(server.sockets[0].getsockname()[:2], link)
    await relay.start()
    try:
        yield relay
    finally:
        await relay.close()
        server.close()
        await server.wait_closed()


async def connect(relay: Relay) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", relay.port)


async def ended(relay: Relay) -> None:
    while relay.num_connections:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("link", [FREE, QUICK], ids=lambda link: link.name)
async def test_all_bytes_pass_both_ways_and_are_counted(link: Link) -> None:
    async with relayed(link) as relay:
        reader, writer = await connect(relay)
        sent = b"".join(number.to_bytes(4, "little") for number in range(50_000))
        writer.write(sent)
        writer.write_eof()
        assert await reader.read(-1) == sent
        writer.close()
        await ended(relay)
        traffic = relay.traffic
        assert (traffic.up, traffic.down) == (len(sent), len(sent))
        assert traffic.wire_up > len(sent) and traffic.wire_down > len(sent)
        assert bool(traffic.lost) == bool(link.loss)


async def test_answers_take_a_round_trip_and_the_first_one_more_for_the_handshake() -> None:
    clock = asyncio.get_running_loop().time
    async with relayed(Link("slow", rtt=0.1)) as relay:
        began = clock()
        reader, writer = await connect(relay)
        for least in (0.2, 0.3):
            writer.write(b"?")
            assert await reader.readexactly(1) == b"?"
            assert clock() - began >= least
        writer.close()


async def test_the_server_may_close_first() -> None:
    async def say(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"bye")
        writer.close()

    async with relayed(QUICK, say) as relay:
        reader, writer = await connect(relay)
        assert await reader.read(-1) == b"bye"
        writer.close()
        await ended(relay)


async def test_a_sender_waits_while_too_much_is_under_way() -> None:
    async with relayed(Link("far", rtt=1e3)) as relay:
        _, writer = await connect(relay)
        writer.write(bytes(8 * WINDOW))
        while relay.traffic.up <= WINDOW:
            await asyncio.sleep(0)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert relay.traffic.up < 2 * WINDOW


async def test_closed_it_resets_connections() -> None:
    closed = asyncio.Event()

    async def watch(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await echo(reader, writer)
        closed.set()

    async with relayed(FREE, watch) as relay:
        reader, writer = await connect(relay)
        writer.write(b"1")
        assert await reader.readexactly(1) == b"1"
        await relay.close()
        assert await _broken(reader)
        await closed.wait()
        writer.close()


async def _broken(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read(1) == b""
    except ConnectionError:
        return True


async def test_where_no_server_listens_the_client_is_reset() -> None:
    gone = await asyncio.start_server(echo, "127.0.0.1", 0)
    address = gone.sockets[0].getsockname()[:2]
    gone.close()
    await gone.wait_closed()
    relay = Relay(address, FREE)
    await relay.start()
    reader, writer = await connect(relay)
    assert await _broken(reader)
    writer.close()
    await relay.close()


async def test_connections_that_stand_change_with_the_link() -> None:
    clock = asyncio.get_running_loop().time
    async with relayed(FREE) as relay:
        reader, writer = await connect(relay)
        relay.shape(Link("slow", rtt=0.1))
        began = clock()
        writer.write(b"?")
        assert await reader.readexactly(1) == b"?"
        assert clock() - began >= 0.1
        writer.close()


def test_traffic_adds_up() -> None:
    one, two = Traffic(1, 2, 3, 4, 5), Traffic(10, 20, 30, 40, 50)
    assert one + two == Traffic(11, 22, 33, 44, 55) and two - one == Traffic(9, 18, 27, 36, 45)
