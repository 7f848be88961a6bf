"""The two ways to have a network between servers and those who use them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal, Protocol

from benchmarks.network.links import LINKS, Link
from benchmarks.network.namespaces import Namespace, NetworkError, unavailable
from benchmarks.network.relay import Relay
from benchmarks.network.traffic import Traffic

TransportName = Literal["namespaces", "relay"]
Address = tuple[str, int]


class Transport(Protocol):
    """A network to servers, whose shape can change."""

    name: TransportName
    host: str

    def command(self, command: list[str]) -> list[str]:
        """What runs a server's ``command`` on the network's other side; it listens on ``host``."""

    async def join(self, server: Address) -> Address:
        """Where a server is reached over the network; what one address carries is counted by itself where that can be had."""

    def shape(self, link: Link) -> None:
        """Be this link from now on."""

    def traffic(self, address: Address) -> Traffic:
        """What has passed on the way to ``address``."""


def choose_transport(wanted: Literal["auto", "namespaces", "relay"], links: list[Link]) -> tuple[TransportName, str | None]:
    """The transport for ``links``, and why it is not the kernel's where that was not asked for; raises NetworkError."""
    if wanted == "relay":
        return wanted, None
    reason = unavailable(shaped=any(link.shaped for link in links))
    if reason is None:
        return "namespaces", None
    if wanted == "namespaces":
        raise NetworkError(reason)
    return "relay", reason


@asynccontextmanager
async def open_transport(name: TransportName, seed: int) -> AsyncIterator[Transport]:
    """A network, gone afterwards; the relay's losses are drawn with ``seed``, the kernel's as it pleases."""
    if name == "namespaces":
        with Namespace() as network:
            yield _Namespaces(network)
        return
    relays = _Relays(seed)
    try:
        yield relays
    finally:
        await relays.close()


class _Namespaces:
    name: TransportName = "namespaces"

    def __init__(self, network: Namespace) -> None:
        self._network, self.host = network, network.address

    def command(self, command: list[str]) -> list[str]:
        return self._network.command(command)

    async def join(self, server: Address) -> Address:
        return server

    def shape(self, link: Link) -> None:
        self._network.shape(link)

    def traffic(self, address: Address) -> Traffic:
        """Of all addresses together: idle edges say next to nothing."""
        return self._network.traffic


class _Relays:
    name: TransportName = "relay"

    def __init__(self, seed: int) -> None:
        self.host = "127.0.0.1"
        self._seed, self._link = seed, LINKS["lan"]
        self._relays: dict[Address, Relay] = {}

    def command(self, command: list[str]) -> list[str]:
        return command

    async def join(self, server: Address) -> Address:
        relay = Relay(server, self._link, self._seed + len(self._relays))
        await relay.start()
        address = ("127.0.0.1", relay.port)
        self._relays[address] = relay
        return address

    def shape(self, link: Link) -> None:
        self._link = link
        for relay in self._relays.values():
            relay.shape(link)

    def traffic(self, address: Address) -> Traffic:
        return self._relays[address].traffic

    async def close(self) -> None:
        for relay in self._relays.values():
            await relay.close()
