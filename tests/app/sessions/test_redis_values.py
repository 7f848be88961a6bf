"""Values in Redis: whole or not there, within their limits whoever writes, and whatever else has happened to the keys."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

from app.sessions.memory_blocks import MemoryBlocks
from app.sessions.redis_blocks import RedisBlocks
from app.sessions.redis_connection import RedisConnection
from app.sessions.redis_responses import RedisResponses
from app.sessions.sealing import OVERHEAD, seal, unseal
from tests.app.sessions.conftest import Connect
from tests.app.sessions.observer import Seen
from tests.app.sessions.redis_server import RedisServer, executables
from tests.app.sessions.stored import response

DAY = 86_400.0
ENDS, SIZES = "t:1:blocks:ends", "t:1:blocks:sizes"


@pytest.fixture(params=list(executables()))
async def raw(servers: dict[str, RedisServer], request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """A client of its own, to an empty Redis."""
    client = servers[request.param].client()
    client.server = servers[request.param]  # type: ignore[attr-defined]
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
def connection(raw: Any, connect: Connect) -> RedisConnection:
    return connect(raw.server)


@pytest.fixture
def blocks(connection: RedisConnection, seen: Seen) -> RedisBlocks:
    return RedisBlocks(connection, "t", 100_000, DAY, seen)


async def kept(raw: Redis) -> dict[str, int]:
    """The sizes of what is really there."""
    return {key.decode().removeprefix("t:1:block:"): await raw.strlen(key) async for key in raw.scan_iter("t:1:block:*")}


async def assert_notes_agree(raw: Redis) -> None:
    """What is noted is what is there."""
    there = await kept(raw)
    noted = {name.decode(): int(size) for name, size in (await raw.hgetall(SIZES)).items()}
    assert noted.pop("", 0) == sum(there.values())
    assert noted == there
    assert {name.decode() for name in await raw.zrange(ENDS, 0, -1)} == there.keys()


def some(*names: str, size: int = 1000) -> dict[str, bytes]:
    return {name: random.Random(name).randbytes(size) for name in names}


class TestSealing:
    def test_only_what_was_sealed_under_a_key_is_read_under_it(self) -> None:
        sealed = seal(b"key", b"payload")
        assert unseal(b"key", sealed) == b"payload"
        assert unseal(b"kez", sealed) is None
        assert all(unseal(b"key", sealed[:length]) is None for length in range(len(sealed)))
        for place in range(len(sealed)):
            changed = sealed[:place] + bytes([sealed[place] ^ 1]) + sealed[place + 1 :]
            assert unseal(b"key", changed) is None

    def test_key_and_payload_cannot_be_shifted_into_each_other(self) -> None:
        assert seal(b"ab", b"c")[-OVERHEAD:-1] != seal(b"a", b"bc")[-OVERHEAD:-1]


class TestTimeToLive:
    async def test_redis_itself_ends_what_is_not_used(self, raw: Any, connection: RedisConnection, seen: Seen) -> None:
        await raw.config_set("notify-keyspace-events", "Ex")
        async with raw.pubsub() as events:
            await events.subscribe("__keyevent@0__:expired")
            await RedisBlocks(connection, "t", 100_000, 0.05, seen).put(some("a"))

            async def expired() -> None:
                async for event in events.listen():
                    if event["data"] == b"t:1:block:a":
                        break

            await asyncio.wait_for(expired(), 30)
        assert await RedisBlocks(connection, "t", 100_000, DAY).known(["a"]) == 0

    @pytest.mark.parametrize("use", ["get", "put"])
    async def test_use_begins_it_anew(self, raw: Any, blocks: RedisBlocks, use: str) -> None:
        await blocks.put(some("a", "b"))
        for key in ("t:1:block:a", ENDS, SIZES):
            assert await raw.pexpire(key, 60_000)
        await (blocks.get(["a"]) if use == "get" else blocks.put(some("a")))
        for key in ("t:1:block:a", ENDS, SIZES):
            assert 60_000 < await raw.pttl(key) <= DAY * 1000

    async def test_responses_end_when_they_are_that_old_however_often_they_are_read(
        self, raw: Any, connection: RedisConnection
    ) -> None:
        responses = RedisResponses(connection, "t", 10, 10_000, DAY)
        await responses.put("", "a", response())
        (key,) = await raw.keys("t:1:response:*")
        assert 60_000 < await raw.pttl(key) <= DAY * 1000
        await raw.pexpire(key, 60_000)
        assert await responses.get("", "a") is not None
        assert await raw.pttl(key) <= 60_000

    async def test_with_a_lease_they_end_sooner_and_give_way_no_sooner(self, raw: Any, connection: RedisConnection) -> None:
        responses = RedisResponses(connection, "t", 2, 10_000, DAY)
        for name, lease in (("a", None), ("b", 60), ("c", None)):
            await responses.put("", name, response(id=name), lease)
        left = {key.rsplit(b":", 1)[1]: await raw.pttl(key) for key in await raw.keys("t:1:response:*")}
        assert left.keys() == {b"b", b"c"}
        assert 0 < left[b"b"] <= 60_000 < left[b"c"]
        await responses.put("", "b", response())
        assert await raw.pttl((await raw.keys("t:1:response:*b"))[0]) > 60_000

    async def test_a_time_to_live_beyond_all_bounds_is_a_long_one(self, raw: Any, connection: RedisConnection) -> None:
        await RedisBlocks(connection, "t", 100_000, 1e300).put(some("a"))
        assert await raw.pttl("t:1:block:a") > 1000 * DAY
        await assert_notes_agree(raw)


class TestLimits:
    async def test_two_servers_at_once_stay_within_the_cap_and_never_read_half_a_value(
        self, raw: Any, connect: Connect, seen: Seen
    ) -> None:
        cap, names = 30_000, [str(number) for number in range(60)]
        done = asyncio.Event()

        async def write(who: int) -> None:
            store, chance = RedisBlocks(connect(raw.server), "t", cap, DAY, seen), random.Random(who)
            for _ in range(150):
                await store.put(some(*chance.sample(names, 3), size=700))
                name = chance.choice(names)
                assert await store.get([name]) in ([], [some(name, size=700)[name]])

        async def watch() -> int:
            looks = 0
            while not done.is_set():
                sizes = await raw.eval(
                    "local sum = 0; for _, key in ipairs(redis.call('KEYS', 't:1:block:*')) do "
                    "sum = sum + redis.call('STRLEN', key) end; return {sum, redis.call('HGET', KEYS[1], '') or '0'}",
                    1,
                    SIZES,
                )
                assert sizes[0] == int(sizes[1]) <= cap
                looks += 1
            return looks

        watching = asyncio.create_task(watch())
        await asyncio.gather(write(1), write(2))
        done.set()
        assert await watching > 10
        await assert_notes_agree(raw)
        assert seen.outcomes["get", "corrupt"] == seen.outcomes["get", "error"] == seen.outcomes["put", "error"] == 0
        assert len(await kept(raw)) == cap // (700 + OVERHEAD)

    @pytest.mark.parametrize("seed", range(3))
    async def test_whatever_happens_the_same_is_kept_as_in_memory(self, raw: Any, connection: RedisConnection, seed: int) -> None:
        chance, names = random.Random(seed), [str(number) for number in range(20)]
        sizes = {name: chance.choice([100, 500, 900]) for name in names}
        in_redis = RedisBlocks(connection, "t", 5000, DAY)
        in_memory = MemoryBlocks(5000, DAY)
        for _ in range(60):
            row = chance.sample(names, chance.randint(1, 8))
            if chance.random() < 0.5:
                await in_memory.put({name: bytes(sizes[name] + OVERHEAD) for name in row})  # in Redis headers count
                await in_redis.put({name: bytes(sizes[name]) for name in row})
            else:
                assert len(await in_redis.get(row)) == len(await in_memory.get(row))
            assert [await in_redis.known([name]) for name in names] == [await in_memory.known([name]) for name in names]
        await assert_notes_agree(raw)

    async def test_what_redis_forgot_by_itself_does_not_count_for_ever(self, raw: Any, blocks: RedisBlocks) -> None:
        await blocks.put(some(*"abcdefghij"))
        await raw.delete("t:1:block:a", "t:1:block:e", "t:1:block:j")
        for number in range(60):  # each looks at a few that it draws
            await blocks.put(some(str(number)))
        await assert_notes_agree(raw)

    async def test_what_is_missed_is_no_longer_noted(self, raw: Any, blocks: RedisBlocks) -> None:
        await blocks.put(some("a", "b"))
        await raw.delete("t:1:block:b")
        assert len(await blocks.get(["a", "b"])) == 1
        await assert_notes_agree(raw)

    async def test_nothing_is_left_when_all_has_ended(self, raw: Any, blocks: RedisBlocks, connection: RedisConnection) -> None:
        responses = RedisResponses(connection, "t", 10, 10_000, DAY)
        await responses.put("", "a", response())
        assert await responses.delete("", "a")
        await blocks.put(some("a"))
        await raw.delete("t:1:block:a")
        assert await blocks.get(["a"]) == []
        assert await raw.keys("*") == []

    @pytest.mark.parametrize(
        "damage",
        [
            lambda raw: raw.delete(ENDS),
            lambda raw: raw.delete(SIZES),
            lambda raw: raw.hdel(SIZES, "b"),
            lambda raw: raw.zrem(ENDS, "b"),
            lambda raw: raw.hset(SIZES, "", "much"),
            lambda raw: raw.hset(SIZES, "", "-1"),
            lambda raw: raw.set(ENDS, "text"),
            lambda raw: raw.set(SIZES, "text"),
            lambda raw: raw.rename(ENDS, SIZES),
        ],
    )
    async def test_notes_that_are_damaged_are_made_anew(
        self, raw: Any, blocks: RedisBlocks, damage: Callable[[Any], Awaitable[Any]]
    ) -> None:
        await blocks.put(some("a", "b", "c"))
        await damage(raw)
        await blocks.put(some("d"))
        await blocks.get(["a", "b", "c"])
        assert len(await kept(raw)) == 4
        await assert_notes_agree(raw)

    async def test_names_in_the_notes_lead_to_no_foreign_keys(self, raw: Any, connection: RedisConnection) -> None:
        await raw.set("precious", "x")
        store = RedisBlocks(connection, "t", 3000, DAY)
        await store.put(some("a"))
        await raw.zadd(ENDS, {"precious": 1, "../../precious": 2, "t:1:block:precious": 3})
        await store.put(some("b"))
        await store.put(some("c"))
        assert await raw.get("precious") == b"x"
        await assert_notes_agree(raw)

    async def test_prefixes_share_nothing(self, raw: Any, connection: RedisConnection) -> None:
        for prefix in "tu":
            await RedisBlocks(connection, prefix, 100_000, DAY).put(some(prefix))
        assert await RedisBlocks(connection, "t", 100_000, DAY).known(["u"]) == 0


class TestDamage:
    @pytest.mark.parametrize(
        "damage",
        [
            lambda raw, key: raw.set(key, "text of somebody else"),
            lambda raw, key: raw.set(key, b""),
            lambda raw, key: raw.setrange(key, 500, "x"),
            lambda raw, key: raw.setrange(key, 4, b"\x02"),
            lambda raw, key: raw.append(key, "x"),
            lambda raw, key: raw.copy("t:1:block:a", key, replace=True),
            lambda raw, key: raw.set(key, b"MoAS\x01"),
        ],
    )
    async def test_a_damaged_value_is_not_there_is_counted_and_deleted(
        self,
        raw: Any,
        blocks: RedisBlocks,
        seen: Seen,
        damage: Callable[[Any, str], Awaitable[Any]],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        row = some("a", "b", "c")
        await blocks.put(row)
        await damage(raw, "t:1:block:b")
        assert await blocks.get(["a", "b", "c"]) == [row["a"]]
        assert seen.outcomes["get", "corrupt"] == 1
        assert not await raw.exists("t:1:block:b")
        await assert_notes_agree(raw)
        await blocks.put(row)
        assert await blocks.get(["a", "b", "c"]) == list(row.values())
        for name in "bc":
            await damage(raw, f"t:1:block:{name}")
            await blocks.get([name])
        assert [record.levelno for record in caplog.records if "damaged" in record.message] == [logging.WARNING]  # not each time

    async def test_a_value_of_another_type_is_not_there_and_replaced(self, raw: Any, blocks: RedisBlocks) -> None:
        await raw.rpush("t:1:block:b", "x")
        row = some("a", "b", "c")
        assert await blocks.known(["b"]) == 0
        assert await blocks.get(["b"]) == []
        await blocks.put(row)
        assert await blocks.known(["a", "b", "c"]) == 3
        assert await blocks.get(["a", "b", "c"]) == list(row.values())
        await assert_notes_agree(raw)

    async def test_a_damaged_response_is_not_there(self, raw: Any, connection: RedisConnection, seen: Seen) -> None:
        responses = RedisResponses(connection, "t", 10, 10_000, DAY, seen)
        await responses.put("me", "a", response())
        (key,) = await raw.keys("t:1:response:*")
        await raw.setrange(key, 30, "x")
        assert await responses.get("me", "a") is None
        assert await responses.delete("me", "a") is False
        assert seen.outcomes["get", "corrupt"] == 1

    @pytest.mark.parametrize("payload", [b"[{},[]]", b'{"a":1}', b"not JSON", b""])
    async def test_a_sealed_value_that_is_no_response_is_not_there(
        self, raw: Any, connection: RedisConnection, seen: Seen, caplog: pytest.LogCaptureFixture, payload: bytes
    ) -> None:
        responses = RedisResponses(connection, "t", 10, 10_000, DAY, seen)
        for name in "ab":
            await responses.put("me", name, response())
            (key,) = await raw.keys(f"t:1:response:*:{name}")
            await raw.set(key, seal(key, payload))
            assert await responses.get("me", name) is None
            assert not await raw.exists(key)
        assert (seen.outcomes["get", "corrupt"], seen.outcomes["get", "miss"], seen.outcomes["get", "hit"]) == (2, 2, 0)
        assert [record.levelno for record in caplog.records if "damaged" in record.message] == [logging.WARNING]  # not each time

    async def test_of_many_a_sample_tells_whose_give_way(self, raw: Any, connection: RedisConnection) -> None:
        """The oldest of all are another's, and stay but for a few."""
        store = RedisResponses(connection, "test", 200, 10_000_000, 60)
        for owner, count in (("you", 100), ("me", 400)):
            for number in range(count):
                await store.put(owner, str(number), response())
        yours = [number for number in range(100) if await store.get("you", str(number)) is not None]
        assert len(yours) > 70
        assert await store.get("me", "399") is not None and await store.get("me", "0") is None
        await assert_notes_agree(raw)

    async def test_keys_tell_nothing_of_owners(self, raw: Any, connection: RedisConnection) -> None:
        await RedisResponses(connection, "t", 10, 10_000, DAY).put("a-tenant", "resp_1", response())
        keys = await raw.keys("*")
        assert len(keys) == 3 and not any(b"a-tenant" in key for key in keys)
        assert not any(b"a-tenant" in name for name in await raw.zrange("t:1:responses:ends", 0, -1))
