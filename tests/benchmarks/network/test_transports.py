"""Choosing a network."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.network import transports
from benchmarks.network.links import LINKS
from benchmarks.network.namespaces import NetworkError
from benchmarks.network.transports import choose_transport, open_transport


def test_what_was_asked_for_is_taken_or_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "unavailable", lambda *, shaped: "no netem" if shaped else None)
    assert choose_transport("relay", [LINKS["4g"]]) == ("relay", None)
    assert choose_transport("auto", [LINKS["4g"]]) == ("relay", "no netem")
    assert choose_transport("auto", [LINKS["lan"]]) == ("namespaces", None)
    assert choose_transport("namespaces", [LINKS["lan"]]) == ("namespaces", None)
    with pytest.raises(NetworkError, match="no netem"):
        choose_transport("namespaces", [LINKS["lan"], LINKS["4g"]])


async def test_relays_count_by_address_and_are_gone_afterwards() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readexactly(1)) * 3)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with open_transport("relay", 0) as transport:
        assert transport.command(["serve"]) == ["serve"]
        first, second = [await transport.join(server.sockets[0].getsockname()[:2]) for _ in range(2)]
        transport.shape(LINKS["5g"])
        reader, writer = await asyncio.open_connection(*first)
        writer.write(b"?")
        assert await reader.read(-1) == b"???"
        writer.close()
        assert (transport.traffic(first).up, transport.traffic(first).down) == (1, 3)
        assert transport.traffic(second).up == 0
    with pytest.raises(OSError):
        await asyncio.open_connection(*first)
    server.close()
    await server.wait_closed()
