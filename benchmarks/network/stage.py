"""The servers and edges of a run, and asking them while counting what it costs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import httpx

from benchmarks.network.asking import Answer, AnswerError, Cost, ask, engine_seconds
from benchmarks.network.kinds import NO_DRAFTER, Kind, Pair, edge_command, server_command
from benchmarks.network.processes import Cores, Process
from benchmarks.network.transports import Address, Transport

_Result = TypeVar("_Result")
CONNECTING = 3
"""How often it is tried."""

SILENCE_S = 120.0
"""How long an answer may say nothing before it counts as failed."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a kind of client asks: a URL each for as many clients as there are, behind ``address`` of the network."""

    kind: Kind
    server: Process
    address: Address
    urls: Sequence[str]
    edges: Sequence[Process] = ()


class Stage:
    """Servers that run, each on its side of a network; edges come and go."""

    def __init__(self, transport: Transport, pair: Pair, cores: Cores | None, servers: dict[str, Process]) -> None:
        self._transport, self._pair, self._cores, self._servers = transport, pair, cores, servers
        self._client = _client()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, transport: Transport, pair: Pair, cores: Cores | None, kinds: Sequence[Kind], slots: int
    ) -> AsyncIterator[Stage]:
        """With the servers that ``kinds`` need; raises ProcessError."""
        servers: dict[str, Process] = {}
        try:
            for kind in kinds:
                if kind.server not in servers:
                    drafter = {"plain": NO_DRAFTER, "moa": pair.drafter, "eagle": str(kind.drafts)}[kind.server]
                    command = transport.command(server_command(pair, drafter, transport.host, slots))
                    servers[kind.server] = await Process.start(command, cores.server if cores else None)
            stage = cls(transport, pair, cores, servers)
            async with stage._client:
                yield stage
        finally:
            for server in servers.values():
                await server.stop()

    @asynccontextmanager
    async def place(self, kind: Kind, clients: int = 1) -> AsyncIterator[Place]:
        """For ``clients`` at once: an edge each, where the kind has edges; raises ProcessError."""
        server = self._servers[kind.server]
        parts = urlsplit(server.url)
        assert parts.hostname is not None and parts.port is not None
        address = await self._transport.join((parts.hostname, parts.port))
        async with AsyncExitStack() as stack:
            edges: list[Process] = []
            if kind.has_edge:
                for number in range(clients):
                    cores = self._cores.edges[number % len(self._cores.edges)] if self._cores else None
                    edge = await Process.start(edge_command(self._pair, kind, address), cores)
                    stack.push_async_callback(edge.stop)
                    edges.append(edge)
            urls = [edge.url for edge in edges] or [f"http://{address[0]}:{address[1]}"] * clients
            yield Place(kind, server, address, urls, edges)

    async def ask(self, place: Place, prompt: Sequence[int], **parameters: object) -> tuple[Answer, Cost]:
        """One prompt, alone, over a connection that stands: servers close those that say nothing for a few seconds.

        Raises AnswerError.
        """
        try:
            await self._connect(place.urls[0])
            return await self._watched(place, lambda: ask(self._client, place.urls[0], prompt, **parameters))
        except httpx.HTTPError as error:
            raise AnswerError(f"{place.urls[0]}: {type(error).__name__} {error}") from error

    async def _connect(self, url: str) -> None:
        """A server may hang up on a connection in the very moment in which it is used again."""
        for left in range(CONNECTING)[::-1]:
            try:
                await self._client.get(f"{url}/health")
            except httpx.TransportError:
                if not left:
                    raise
            else:
                return

    async def load(
        self, place: Place, prompts: Sequence[Sequence[int]], parameters: Sequence[dict[str, object]]
    ) -> tuple[list[Answer], float, Cost]:
        """All prompts, from as many clients as the place has, each asking the next one when it has its answer.

        Answers in order, seconds until the last one's end, and what all of it cost; ``parameters`` are of each prompt. Raises
        AnswerError, once all others have their answer, where one fails.
        """
        answers: dict[int, Answer] = {}
        waiting = list(enumerate(prompts))[::-1]

        async def work(url: str) -> None:
            async with _client() as client:
                while waiting:
                    number, prompt = waiting.pop()
                    answers[number] = await ask(client, url, prompt, **parameters[number])

        async def all_of_it() -> float:
            began = time.perf_counter()
            ends = await asyncio.gather(*map(work, place.urls), return_exceptions=True)
            for failure in ends:
                if failure is not None:
                    raise failure
            return time.perf_counter() - began

        try:
            seconds, cost = await self._watched(place, all_of_it)
        except httpx.HTTPError as error:
            raise AnswerError(f"{place.server.url}: {type(error).__name__} {error}") from error
        return [answers[number] for number in range(len(prompts))], seconds, cost

    async def _watched(self, place: Place, work: Callable[[], Awaitable[_Result]]) -> tuple[_Result, Cost]:
        """What ``work`` gives, and what it cost; asking for /metrics goes around the link where it can, and is not counted."""
        busy, steps = await engine_seconds(self._client, place.server.url)
        traffic, server = self._transport.traffic(place.address), place.server.cpu_seconds
        edges = [edge.cpu_seconds for edge in place.edges]
        result = await work()
        traffic, server_cpu = self._transport.traffic(place.address) - traffic, _since(server, place.server.cpu_seconds)
        edge_cpu = _total([_since(before, edge.cpu_seconds) for before, edge in zip(edges, place.edges, strict=True)])
        later, steps_later = await engine_seconds(self._client, place.server.url)
        return result, Cost(traffic, later - busy, steps_later - steps, server_cpu, edge_cpu)


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=httpx.Timeout(SILENCE_S))


def _since(before: float | None, now: float | None) -> float | None:
    return None if before is None or now is None else now - before


def _total(seconds: Sequence[float | None]) -> float | None:
    known = [each for each in seconds if each is not None]
    return sum(known) if known and len(known) == len(seconds) else None
