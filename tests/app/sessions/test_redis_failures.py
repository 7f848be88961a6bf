"""A Redis that is away, frozen, full, loading, slow, closed to us or something else: nothing is found, and nobody waits twice."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.exceptions import BusyLoadingError

from app.sessions import redis_connection
from app.sessions.redis_blocks import RedisBlocks
from app.sessions.redis_connection import RedisConnection
from app.sessions.redis_responses import RedisResponses
from tests.app.sessions.conftest import Connect
from tests.app.sessions.observer import Seen
from tests.app.sessions.proxy import proxy_to
from tests.app.sessions.redis_server import RedisServer, redis_server
from tests.app.sessions.stored import response

DAY = 86_400.0
IMPATIENT = 0.5
BLOCKS = {f"k:{number}": random.Random(number).randbytes(1000) for number in range(8)}
KEYS, VALUES = list(BLOCKS), list(BLOCKS.values())
RESPONSE = response(id="a")


class Both:
    """Both stores on one connection."""

    def __init__(self, connection: RedisConnection, seen: Seen, prefix: str = "t") -> None:
        self.connection = connection
        self.blocks = RedisBlocks(connection, prefix, 2**20, DAY, seen)
        self.responses = RedisResponses(connection, prefix, 100, 2**20, DAY, seen)

    async def assert_have(self) -> None:
        """All works."""
        await self.blocks.put(BLOCKS)
        assert await self.blocks.get(KEYS) == VALUES
        assert await self.blocks.known(KEYS) == len(KEYS)
        await self.responses.put("", "a", RESPONSE)
        assert await self.responses.get("", "a") == RESPONSE

    async def assert_have_nothing(self) -> None:
        """They forget all, and raise nothing."""
        await self.blocks.put(BLOCKS)
        assert await self.blocks.get(KEYS) == []
        assert await self.blocks.known(KEYS) == 0
        await self.responses.put("", "a", RESPONSE)
        assert await self.responses.get("", "a") is None
        assert await self.responses.delete("", "a") is False


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "moaserve.sessions")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log says of Redis, a word a line."""
    words = {"is away": "away", "is there": "there", "takes no new": "full", "takes new": "takes"}
    return [word for record in caplog.records for text, word in words.items() if text in record.getMessage()]


async def test_it_may_be_away_at_first(connect: Connect, seen: Seen, caplog: pytest.LogCaptureFixture) -> None:
    with redis_server(started=False) as server:
        both = Both(connect(server), seen)
        both.connection.start()
        await seen.until(False)
        for _ in range(10):
            await both.assert_have_nothing()
        assert sum(seen.timed.values()) == 0  # it was not even asked
        server.start()
        await seen.until(True)
        await both.assert_have()
    assert lines(caplog) == ["away", "there"]


async def test_it_is_killed_and_comes_back(
    redis: RedisServer, connect: Connect, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    both = Both(connect(redis), seen)
    await both.assert_have()
    for _ in range(2):
        redis.kill()
        for _ in range(10):
            await both.assert_have_nothing()
        redis.start()
        await seen.until(True)
        await both.assert_have()
    assert lines(caplog) == ["there", "away", "there", "away", "there"]


async def test_a_restart_between_two_questions_is_not_noticed(redis: RedisServer, connect: Connect, seen: Seen) -> None:
    both = Both(connect(redis), seen)
    await both.assert_have()
    redis.kill()
    redis.start()
    assert await both.blocks.get(KEYS) == []
    await both.assert_have()
    assert seen.changes == [True]


async def test_frozen_it_costs_one_timeout_however_many_ask(
    redis: RedisServer, connect: Connect, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    both = Both(connect(redis, IMPATIENT), seen)
    await both.assert_have()
    before = sum(seen.timed.values())
    redis.signal(signal.SIGSTOP)
    assert await asyncio.gather(*(both.blocks.get(KEYS) for _ in range(16))) == [[]] * 16  # together they wait once
    assert sum(seen.timed.values()) == before + 16
    for _ in range(10):
        await both.assert_have_nothing()
    assert sum(seen.timed.values()) == before + 16
    redis.signal(signal.SIGCONT)
    await seen.until(True)
    assert await both.blocks.get(KEYS) == VALUES
    assert lines(caplog)[:3] == ["there", "away", "there"]


async def test_frozen_it_delays_neither_start_nor_end(redis: RedisServer, seen: Seen) -> None:
    redis.signal(signal.SIGSTOP)
    connection = RedisConnection(redis.url, 20.0, "t:probe", seen)
    connection.start()
    waiting = asyncio.create_task(Both(connection, seen).blocks.get(KEYS))
    await asyncio.sleep(0)
    await asyncio.wait_for(connection.close(), 10)  # half as long as the timeout
    assert await asyncio.wait_for(waiting, 10) == []
    assert await Both(connection, seen).blocks.get(KEYS) == []


async def test_a_request_that_is_cancelled_takes_no_connection_with_it(
    redis: RedisServer, connect: Connect, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_connection, "CONNECTIONS", 2)
    both = Both(connect(redis), seen)
    await both.assert_have()
    for turn in range(20):
        asked = [asyncio.create_task(both.blocks.get(KEYS)) for _ in range(3)]
        for _ in range(turn):
            await asyncio.sleep(0)
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)
    await both.assert_have()
    assert seen.changes == [True]


async def test_full_it_is_read_and_asked_again_when_it_has_room(
    redis: RedisServer, connect: Connect, seen: Seen, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_connection, "FIRST_PAUSE_S", 0.0)
    both = Both(connect(redis), seen)
    await both.assert_have()
    async with redis.client() as raw:
        await raw.config_set("maxmemory-policy", "noeviction")
        await raw.config_set("maxmemory", 1)
        assert await both.blocks.get(KEYS) == VALUES
        for number in range(3):
            await both.blocks.put({f"new:{number}": bytes(1000)})
            await both.responses.put("", "b", RESPONSE)
            assert await both.responses.get("", "b") is None
        assert await both.blocks.get(KEYS) == VALUES
        assert seen.outcomes["put", "error"] == 6
        await raw.config_set("maxmemory", 0)
    await both.blocks.put({"new": bytes(1000)})
    assert await both.blocks.known(["new"]) == 1
    assert lines(caplog) == ["there", "full", "takes"]
    assert seen.changes == [True]


async def test_full_it_is_left_alone_for_a_moment(redis: RedisServer, connect: Connect, seen: Seen) -> None:
    async with proxy_to(redis.socket) as proxy, redis.client() as raw:
        both = Both(connect(proxy.url), seen)
        await both.assert_have()
        await raw.config_set("maxmemory", 1)
        both.connection._write_pause = 3600  # for as long as this test takes
        await both.blocks.put({"new": bytes(1000)})
        asked = proxy.asked
        for _ in range(10):
            await both.blocks.put({"new": bytes(1000)})
        assert proxy.asked == asked


@pytest.mark.parametrize("policy", ["allkeys-random", "allkeys-lru", "volatile-ttl"])
async def test_where_it_evicts_by_itself_all_goes_on(redis: RedisServer, connect: Connect, seen: Seen, policy: str) -> None:
    both = Both(connect(redis), seen)
    async with redis.client() as raw:
        used = (await raw.info("memory"))["used_memory"]
        await raw.config_set("maxmemory-policy", policy)
        await raw.config_set("maxmemory", used + 2**20)
        for number in range(300):
            await both.blocks.put({f"{number}:{place}": random.randbytes(1000) for place in range(8)})
        assert (await raw.info("stats"))["evicted_keys"] > 1000
        assert await raw.zcard("t:1:blocks:ends") < 2 * len(await raw.keys("t:1:block:*"))
        await raw.config_set("maxmemory", 0)
        await both.assert_have()
    assert seen.outcomes["put", "error"] == seen.outcomes["get", "corrupt"] == 0


async def test_read_only_it_is_read(redis: RedisServer, connect: Connect, seen: Seen, caplog: pytest.LogCaptureFixture) -> None:
    both = Both(connect(redis), seen)
    await both.assert_have()
    async with redis.client() as raw:
        await raw.execute_command("REPLICAOF", "127.0.0.1", "1")
        for _ in range(3):
            await both.blocks.put({"new": bytes(1000)})
            assert await both.blocks.get(KEYS) == VALUES
            assert await both.responses.get("", "a") == RESPONSE
            assert await both.responses.delete("", "a") is False
        await raw.execute_command("CONFIG", "SET", "replica-serve-stale-data", "no")
        for _ in range(3):
            await both.assert_have_nothing()
        await raw.execute_command("REPLICAOF", "NO", "ONE")
    await seen.until(True)
    assert lines(caplog)[:4] == ["there", "full", "away", "there"]


async def test_while_it_loads_its_data_it_is_away(connect: Connect, seen: Seen, caplog: pytest.LogCaptureFixture) -> None:
    with redis_server() as server:
        async with server.client() as raw:
            await raw.mset({f"other:{number}": "x" * 100 for number in range(10_000)})
            await raw.save()
        server.kill()
        # A millisecond a key, and an ear for commands now and then: as Redis tests this itself.
        try:
            server.start("--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024", until="RDB age")
        except AssertionError as error:
            pytest.skip(f"this Redis server cannot be made to load slowly; apt-get install redis-server (7 or later): {error}")
        both = Both(connect(server), seen)
        await both.assert_have_nothing()
        assert lines(caplog) == ["away"] and "loading" in caplog.text
        async with server.client() as raw:
            with pytest.raises(BusyLoadingError):
                await raw.get("x")
            await raw.config_set("key-load-delay", 0)
        await seen.until(True)
        await both.assert_have()
    assert lines(caplog) == ["away", "there"]


async def test_slow_it_costs_one_timeout(
    redis: RedisServer, connect: Connect, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    async with proxy_to(redis.socket) as proxy:
        both = Both(connect(proxy.url, IMPATIENT), seen)
        await both.assert_have()
        proxy.delay = 3600  # for as long as this test takes
        before = sum(seen.timed.values())
        assert await both.blocks.get(KEYS) == []
        for _ in range(10):
            await both.assert_have_nothing()
        assert sum(seen.timed.values()) == before + 1
        proxy.delay = 0
        await seen.until(True)
        assert await both.blocks.get(KEYS) == VALUES
    assert lines(caplog)[:3] == ["there", "away", "there"]


async def test_a_server_that_is_held_up_itself_does_not_blame_redis(redis: RedisServer, connect: Connect, seen: Seen) -> None:
    both = Both(connect(redis, IMPATIENT), seen)
    await both.assert_have()
    asked = asyncio.create_task(both.blocks.get(KEYS[:4]))
    for turn in range(4):
        await asyncio.sleep(0)
        if turn == 2:
            time.sleep(2 * IMPATIENT)  # as a computation in the event loop does
    assert await asked == VALUES[:4]
    assert seen.changes == [True]


async def test_what_has_come_in_time_is_used_and_lateness_is_no_failure(redis: RedisServer, connect: Connect, seen: Seen) -> None:
    async with proxy_to(redis.socket) as proxy:
        await Both(connect(redis), seen).assert_have()
        seen.changes.clear()
        both = Both(connect(proxy.url, 2.0), seen)
        asked, answer = 0, both.blocks._values.leading

        async def late(*args: object, **options: object) -> list[bytes]:
            nonlocal asked
            asked += 1
            proxy.delay = 3600 if asked == 2 else 0
            return await answer(*args, **options)  # type: ignore[arg-type]

        both.blocks._values.leading = late  # type: ignore[assignment]
        assert await both.blocks.get(KEYS) == VALUES[:4]
        assert seen.changes == [True]


@pytest.fixture
def locked(redis: RedisServer) -> Iterator[str]:
    """A server whose users need passwords; the URL without one."""
    rules = "user default off", "user reader on >right ~t:* +mget +ping +client +hello", "user all on >right ~* +@all"
    redis.kill()
    acl = redis.folder / "users.acl"
    acl.write_text("\n".join(rules) + "\n")
    redis.start("--aclfile", str(acl))
    yield f"unix://{{}}@{redis.socket}"


async def test_a_wrong_password_is_told_once_and_never_shown(
    locked: str, connect: Connect, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    both = Both(connect(locked.format("all:se%2Fcret")), seen)
    both.connection.start()
    await seen.until(False)
    for _ in range(5):
        await both.assert_have_nothing()
    assert lines(caplog) == ["away"]
    assert "invalid username-password pair" in caplog.text
    assert "se/cret" not in caplog.text and "se%2Fcret" not in caplog.text
    assert "cret" not in repr(both.connection._pool)
    await Both(connect(locked.format("all:right"), observer=Seen()), Seen()).assert_have()


async def test_one_who_may_only_read_reads(locked: str, connect: Connect, seen: Seen, caplog: pytest.LogCaptureFixture) -> None:
    await Both(connect(locked.format("all:right"), observer=Seen()), Seen()).assert_have()
    both = Both(connect(locked.format("reader:right")), seen)
    await both.blocks.put({"new": bytes(1000)})
    await both.blocks.put({"new": bytes(1000)})
    assert await both.blocks.get(KEYS) == VALUES
    assert lines(caplog) == ["there", "there", "full"]  # the first is the other's, who may write


async def test_the_user_that_the_documentation_proposes_may_do_all_that_is_needed(
    redis: RedisServer, connect: Connect, seen: Seen
) -> None:
    text = (Path(__file__).parents[3] / "docs" / "sessions.md").read_text()
    rule = re.search(r"`ACL (SETUSER moaserve [^`]*)`", text)
    assert rule is not None
    async with redis.client() as raw:
        await raw.execute_command("ACL", *rule[1].replace("PASSWORD", "right").split())
    connection = connect(f"unix://moaserve:right@{redis.socket}")
    connection._probe = "moaserve:probe"
    both = Both(connection, seen, "moaserve")
    await both.assert_have()
    async with redis.client() as raw:
        await raw.delete("moaserve:1:blocks:sizes", "moaserve:1:block:k:0")
    await both.assert_have()
    assert await both.responses.delete("", "a")
    assert seen.outcomes.keys() <= {("put", "ok"), ("get", "hit"), ("known", "hit"), ("delete", "ok")}


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff\xfe" * 50 + b"\r\n", b"", b"$99999999\r\nx"])
async def test_something_else_at_its_place_is_no_redis(greeting: bytes, connect: Connect, seen: Seen) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(greeting)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    both = Both(connect(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", IMPATIENT), seen)
    for _ in range(3):
        await both.assert_have_nothing()
    assert seen.changes == [False]
    server.close()


async def test_what_is_logged_tells_nothing_of_what_is_kept(
    redis: RedisServer, connect: Connect, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    both = Both(connect(redis), seen)
    async with redis.client() as raw:
        await raw.config_set("maxmemory", 1)
        await both.responses.put("owner", "resp_1", response(text="a secret"))
        await both.blocks.put({"fingerprint:hash": b"a secret"})
    assert lines(caplog) == ["there", "full"]
    for word in ("secret", "resp_1", "fingerprint", "EVAL"):
        assert word not in caplog.text


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1, its key beside it."""
    try:
        subprocess.run(
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
            f"-addext subjectAltName=IP:127.0.0.1 -keyout {tmp_path}/key.pem -out {tmp_path}/cert.pem",
            shell=True,
            check=True,
            capture_output=True,
        )
    except subprocess.CalledProcessError:
        pytest.skip("there is no openssl to make a certificate with: apt-get install openssl")
    return tmp_path / "cert.pem"


async def test_tls(connect: Connect, seen: Seen, certificate: Path, unused_tcp_port: int, caplog: pytest.LogCaptureFixture) -> None:
    port, key = unused_tcp_port, certificate.with_name("key.pem")
    options = f"--tls-port {port} --bind 127.0.0.1 --tls-cert-file {certificate} --tls-key-file {key} --tls-auth-clients no"
    with redis_server(started=False) as server:
        try:
            server.start(*options.split())
        except AssertionError as error:
            pytest.skip(f"this Redis server knows no TLS; apt-get install redis-server: {error}")
        await Both(connect(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate}"), seen).assert_have()
        stranger = Both(connect(f"rediss://127.0.0.1:{port}/0", observer=seen), seen)
        await stranger.assert_have_nothing()
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
