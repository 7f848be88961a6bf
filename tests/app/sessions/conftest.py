"""Redis servers, connections to them and stores in them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack

import pytest

from app.sessions.redis_connection import RedisConnection
from tests.app.sessions.observer import Seen
from tests.app.sessions.redis_server import RedisServer, executables, redis_server

PATIENT = 20.0
"""A timeout that no working server exceeds, however busy the machine is."""

Connect = Callable[..., RedisConnection]


@pytest.fixture(scope="session")
def servers() -> Iterator[dict[str, RedisServer]]:
    """A server of each version there is, by where it comes from. Tests share them, and empty them before use."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(redis_server(executable=path)) for name, path in executables().items()}


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """A server for one test alone."""
    with redis_server() as server:
        yield server


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
async def connect(seen: Seen) -> AsyncIterator[Connect]:
    """Makes connections, which are closed after the test."""
    made: list[RedisConnection] = []

    def connect(server: RedisServer | str, timeout: float = PATIENT, observer: Seen | None = None) -> RedisConnection:
        url = server if isinstance(server, str) else server.url
        made.append(RedisConnection(url, timeout, "t:probe", observer or seen))
        return made[-1]

    yield connect
    for connection in made:
        await connection.close()
