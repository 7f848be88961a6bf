"""What both kinds of stores do alike: in memory, and in each version of Redis there is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from app.sessions.blocks import BlockStore
from app.sessions.memory import MemoryStore
from app.sessions.memory_blocks import MemoryBlocks
from app.sessions.redis_blocks import RedisBlocks
from app.sessions.redis_responses import RedisResponses
from app.sessions.sealing import OVERHEAD
from app.sessions.store import ResponseStore
from tests.app.sessions.conftest import Connect
from tests.app.sessions.observer import Seen
from tests.app.sessions.redis_server import RedisServer, executables
from tests.app.sessions.stored import response

DAY = 86_400.0
KEYS = [f"3f:{place:02x}" for place in range(40)]

MakeBlocks = Callable[[int], BlockStore]
MakeResponses = Callable[[int, int], ResponseStore]


@pytest.fixture(params=["memory", *executables()])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
async def server(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[RedisServer | None]:
    """An empty Redis of the kind, unless that is memory."""
    if kind == "memory":
        yield None
        return
    servers = request.getfixturevalue("servers")
    async with servers[kind].client() as client:
        await client.flushall()
    yield servers[kind]


@pytest.fixture
def make_blocks(server: RedisServer | None, connect: Connect, seen: Seen) -> MakeBlocks:
    """Stores that have room for so many bytes, whatever each value costs besides."""

    def make(most_bytes: int) -> BlockStore:
        return MemoryBlocks(most_bytes, DAY, seen) if server is None else RedisBlocks(connect(server), "t", most_bytes, DAY, seen)

    return make


@pytest.fixture
def make_responses(server: RedisServer | None, connect: Connect, seen: Seen) -> MakeResponses:
    def make(most: int, most_bytes: int) -> ResponseStore:
        if server is None:
            return MemoryStore(most, most_bytes, DAY, observer=seen)
        return RedisResponses(connect(server), "t", most, most_bytes, DAY, seen)

    return make


def room_for(count: int, size: int) -> int:
    """Bytes that hold ``count`` values of ``size`` bytes, and no more of them, with or without headers."""
    return count * (size + OVERHEAD)


def row(first: int, count: int, size: int = 1000) -> dict[str, bytes]:
    return {KEYS[place]: random.Random(place).randbytes(size) for place in range(first, first + count)}


class TestBlocks:
    async def test_leading_blocks_are_found_up_to_the_first_that_is_missing(self, make_blocks: MakeBlocks, seen: Seen) -> None:
        store = make_blocks(2**20)
        blocks = row(0, 40)
        del blocks[KEYS[30]]
        await store.put(blocks)
        assert await store.get(KEYS) == [blocks[key] for key in KEYS[:30]]
        assert await store.known(KEYS) == 30
        assert await store.get(KEYS[30:]) == [] and await store.known(KEYS[30:]) == 0
        assert await store.get([]) == [] and await store.known([]) == 0
        assert seen.outcomes == {
            ("put", "ok"): 1, ("get", "hit"): 1, ("known", "hit"): 1, ("get", "miss"): 2, ("known", "miss"): 2
        }  # fmt: skip
        assert seen.bytes == {"written": 39_000, "read": 30_000}

    async def test_any_bytes_are_kept(self, make_blocks: MakeBlocks) -> None:
        blocks = {"empty": b"", "zeros": bytes(100), "lines": b"\r\n$-1\r\n", "large": random.Random(0).randbytes(9 * 2**20)}
        store = make_blocks(2**30)
        await store.put(blocks)
        assert await store.get(list(blocks)) == list(blocks.values())

    async def test_those_used_last_stay(self, make_blocks: MakeBlocks) -> None:
        store = make_blocks(room_for(4, 1000))
        await store.put(row(0, 2))
        await store.put(row(2, 2))
        assert len(await store.get(KEYS[2:4])) == 2
        assert await store.known(KEYS[:2]) == 2  # whoever asks this goes on with them
        await store.put(row(4, 2))
        assert [await store.known([key]) for key in KEYS[:6]] == [1, 1, 0, 0, 1, 1]
        await store.put(row(0, 2))  # nothing new, but a use
        await store.put(row(6, 2))
        assert [await store.known([key]) for key in KEYS[:8]] == [1, 1, 0, 0, 0, 0, 1, 1]

    async def test_a_row_loses_its_end_first(self, make_blocks: MakeBlocks) -> None:
        store = make_blocks(room_for(10, 1000))
        await store.put(row(0, 10))
        await store.put(row(30, 3))
        assert await store.known(KEYS[:10]) == 7
        assert len(await store.get(KEYS[:7])) == 7
        await store.put(row(33, 5))
        assert await store.known(KEYS[:10]) == 5  # of the others three were used longer ago

    async def test_more_than_there_is_room_for(self, make_blocks: MakeBlocks) -> None:
        store = make_blocks(room_for(10, 1000))
        await store.put(row(0, 40))
        assert await store.known(KEYS) == 10

    async def test_what_is_larger_than_the_whole_store_is_not_kept_and_nobody_gives_way(self, make_blocks: MakeBlocks) -> None:
        store = make_blocks(room_for(2, 1000))
        await store.put(row(0, 2))
        await store.put({"large": bytes(3000)})
        assert (await store.known(["large"]), await store.known(KEYS[:2])) == (0, 2)

    async def test_sixteen_at_once(self, make_blocks: MakeBlocks) -> None:
        store = make_blocks(2**24)

        async def talk(who: int) -> None:
            mine = {f"{who}:{key}": block for key, block in row(0, 40).items()}
            shared = row(0, 40)
            for turn in range(4, 41, 4):
                await store.put(dict(list(mine.items())[:turn]))
                await store.put(dict(list(shared.items())[:turn]))
                assert await store.get(list(mine)) == list(mine.values())[:turn]
                assert (await store.get(list(shared)))[:turn] == list(shared.values())[:turn]

        await asyncio.gather(*map(talk, range(16)))


class TestResponses:
    async def test_put_get_delete(self, make_responses: MakeResponses, seen: Seen) -> None:
        store = make_responses(10, 10_000)
        stored = response({"id": "rs_1", "type": "reasoning", "n": 1.5, "none": None}, id="a", text="ü\ud800\0")
        await store.put("me", "a", stored)
        assert await store.get("me", "a") == stored
        changed = response(id="a")
        await store.put("me", "a", changed)
        assert await store.get("me", "a") == changed
        assert await store.delete("me", "a") is True
        assert await store.delete("me", "a") is False
        assert await store.get("me", "a") is None
        assert seen.outcomes == {
            ("put", "ok"): 2, ("get", "hit"): 2, ("get", "miss"): 1, ("delete", "ok"): 1, ("delete", "miss"): 1
        }  # fmt: skip

    async def test_each_owner_has_his_own(self, make_responses: MakeResponses) -> None:
        store = make_responses(10, 10_000)
        await store.put("me", "a", response())
        for stranger in ("", "you", "me:a", "ME"):
            assert await store.get(stranger, "a") is None
            assert await store.delete(stranger, "a") is False
        await store.put("you", "a", response(yours=True))
        assert await store.get("me", "a") == response()

    @pytest.mark.parametrize("response_id", ["", "*", "a:b", "ä", "half a pair \ud800", "x" * 10_000, "\r\n"])
    async def test_any_id_may_be_asked_for(self, make_responses: MakeResponses, response_id: str) -> None:
        store = make_responses(10, 10_000)
        assert await store.get("me", response_id) is None
        await store.put("me", response_id, response())
        assert await store.get("me", response_id) is not None

    async def test_the_oldest_give_way_to_more(self, make_responses: MakeResponses) -> None:
        store = make_responses(2, 10_000)
        for name in "abc":
            await store.put("", name, response())
            await store.get("", "a")  # looking does not make it newer
        assert await _there(store) == ["b", "c"]
        await store.put("", "b", response())  # anew
        await store.put("", "d", response())
        assert await _there(store) == ["b", "d"]

    async def test_the_oldest_give_way_to_larger_ones(self, make_responses: MakeResponses) -> None:
        store = make_responses(10, room_for(2, 1000))
        for name in "abc":
            await store.put("", name, response(text="x" * 850))
        assert await _there(store) == ["b", "c"]
        await store.put("", "c", response(text="x" * 3000))  # too large: and what it replaces is gone
        assert await _there(store) == ["b"]

    @pytest.mark.parametrize(("most", "most_bytes", "size"), [(4, 100_000, 10), (100, room_for(4, 1000), 850)])
    async def test_who_floods_the_store_loses_his_own(
        self, make_responses: MakeResponses, most: int, most_bytes: int, size: int
    ) -> None:
        store = make_responses(most, most_bytes)
        await store.put("me", "a", response(text="x" * size))
        for number in range(20):
            await store.put("you", str(number), response(text="x" * size))
        assert await store.get("me", "a") is not None
        assert [number for number in range(20) if await store.get("you", str(number)) is not None] == [17, 18, 19]

    async def test_where_there_is_no_room_nothing_is_kept(self, make_responses: MakeResponses) -> None:
        store = make_responses(0, 10_000)
        await store.put("", "a", response())
        assert await store.get("", "a") is None


async def _there(store: ResponseStore) -> list[str]:
    return [name for name in "abcd" if await store.get("", name) is not None]
