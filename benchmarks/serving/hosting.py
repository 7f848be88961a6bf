"""Servers under load: those that a measurement starts itself, or one that runs already."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from benchmarks.network.asking import read_engine_seconds
from benchmarks.network.processes import Process
from benchmarks.prompts import Prompt
from benchmarks.serving.client import Address
from benchmarks.serving.ways import OFF, WAYS, Own, ServerName

Form = Literal["tokens", "text", "chat"]
_ASKING_S = 10.0


class ServerError(Exception):
    """There is nothing to measure at an address; the message says why."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a load took of processors, in seconds, and of its server's engine at its steps; None where nobody tells.

    ``others`` are servers that were not asked: what they take is taken from the one that is.
    """

    busy: float | None
    server: float | None
    others: float | None

    def __sub__(self, before: Cost) -> Cost:
        def since(now: float | None, then: float | None) -> float | None:
            return None if now is None or then is None else now - then

        return Cost(since(self.busy, before.busy), since(self.server, before.server), since(self.others, before.others))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a way is asked for; ``body`` goes into every request, and ``plain`` into those that must be decoded plainly."""

    way: str
    address: Address
    form: Form
    body: dict[str, Any]
    plain: dict[str, Any]
    server: Process | None = None
    others: Sequence[Process] = field(default=(), repr=False)

    def request(self, prompt: Prompt, body: dict[str, Any], *, plain: bool = False) -> bytes:
        """To ask ``prompt`` in the place's form, with the parameters ``body``."""
        asked: dict[str, Any]
        if self.form == "chat":
            route, asked = "/chat/completions", {"messages": prompt.messages}
        else:
            route, asked = "/completions", {"prompt": list(prompt.token_ids) if self.form == "tokens" else prompt.text}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return self.address.request(route, asked | stream | body | self.body | (self.plain if plain else {}))

    async def cost(self) -> Cost:
        """So far."""
        if self.server is None:
            return Cost(None, None, None)
        async with httpx.AsyncClient(timeout=_ASKING_S) as client:
            response = await client.get(f"{self.server.url}/metrics")
            response.raise_for_status()
        seconds = [other.cpu_seconds for other in self.others]
        known = [each for each in seconds if each is not None]
        return Cost(
            read_engine_seconds(response.text)[0],
            self.server.cpu_seconds,
            sum(known) if len(known) == len(seconds) else None,
        )


@dataclass(frozen=True, slots=True)
class Other:
    """A server that runs already, asked in one way: ``body`` goes into every request."""

    name: str
    base_url: str
    api_key: str | None = field(repr=False)
    served_model: str | None
    form: Form
    body: dict[str, Any]


@asynccontextmanager
async def hosted(own: Own | Other, ways: Sequence[str], cores: frozenset[int] | None) -> AsyncIterator[list[Place]]:
    """A place for each way, on servers that all run meanwhile; raises ProcessError, and ServerError for one that is not ours."""
    if isinstance(own, Other):
        yield [await _other(own)]
        return
    servers: dict[ServerName, Process] = {}
    try:
        for name in ways:
            if (server := WAYS[name].server) not in servers:
                servers[server] = await Process.start(own.command(server), cores)
        yield [_own(name, servers) for name in ways]
    finally:
        for process in servers.values():
            await process.stop()


def _own(name: str, servers: dict[ServerName, Process]) -> Place:
    way = WAYS[name]
    server = servers[way.server]
    others = [each for each in servers.values() if each is not server]
    return Place(name, Address.of(f"{server.url}/v1"), "tokens", way.body, WAYS[OFF].body, server, others)


async def _other(other: Other) -> Place:
    try:
        address = await Address.of(other.base_url, other.api_key).located()
    except OSError as error:
        raise ServerError(f"no server answers ({error})") from error
    model = other.served_model or await _model(other)
    return Place(other.name, address, other.form, {"model": model} | other.body, {})


async def _model(other: Other) -> str:
    """The first that the server has."""
    headers = {"Authorization": f"Bearer {other.api_key}"} if other.api_key else {}
    try:
        async with httpx.AsyncClient(timeout=_ASKING_S, headers=headers) as client:
            response = await client.get(f"{other.base_url.rstrip('/')}/models")
            response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.TransportError as error:
        raise ServerError(f"no server answers ({str(error) or type(error).__name__})") from error
    except httpx.HTTPStatusError as error:
        told = error.response.status_code
        why = "is --api-key right?" if told in (401, 403) else "is this where its routes stand, with /v1? Else say --served-model"
        raise ServerError(f"/models says {told}: {why}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ServerError("/models names no model: say --served-model") from error
