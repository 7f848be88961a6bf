"""Writing in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

import pytest

from app.sessions.memory_blocks import MemoryBlocks
from app.sessions.writing import WrittenLater
from tests.app.sessions.observer import Seen


class Slow(MemoryBlocks):
    """Takes what is put only when it is told to."""

    def __init__(self) -> None:
        super().__init__(2**30, 60)
        self.batches: list[list[str]] = []
        self.go_on = asyncio.Event()
        self.closed = False

    async def put(self, blocks: Mapping[str, bytes]) -> None:
        await self.go_on.wait()
        self.batches.append(list(blocks))
        await super().put(blocks)

    async def close(self) -> None:
        self.closed = True


def some(*keys: str, size: int = 10) -> dict[str, bytes]:
    return {key: key.encode() * size for key in keys}


async def written(store: WrittenLater) -> None:
    """Until nothing waits."""
    if store._writer is not None:
        await asyncio.wait([store._writer], timeout=30)


async def have(store: WrittenLater, keys: Sequence[str]) -> bool:
    return len(await store.get(keys)) == await store.known(keys) == len(keys)


async def test_nobody_waits_and_all_is_written_in_order() -> None:
    slow = Slow()
    store = WrittenLater(slow)
    await store.put(some("a", "b"))
    await store.put(some("b", "c"))  # b waits already
    assert await store.known(["a"]) == 0
    slow.go_on.set()
    await written(store)
    assert slow.batches == [["a", "b", "c"]]
    assert await have(store, ["a", "b", "c"])
    await store.put(some("d"))
    await written(store)
    assert await have(store, ["a", "d"])
    await store.close()
    assert slow.closed


class Broken(Slow):
    """Fails with what nobody foresaw, once."""

    async def put(self, blocks: Mapping[str, bytes]) -> None:
        if "lost" in blocks:
            raise RuntimeError("nobody foresaw it")
        await super().put(blocks)


async def test_a_batch_that_fails_gives_its_room_back(caplog: pytest.LogCaptureFixture) -> None:
    broken = Broken()
    broken.go_on.set()
    store = WrittenLater(broken, most_bytes=100)
    for key in ("lost", "a", "b", "c"):
        await store.put(some(key, size=20))
        await written(store)
    assert await have(store, ["a", "b", "c"])
    assert "1 blocks could not be stored" in caplog.text


async def test_a_batch_is_some_mebibytes() -> None:
    slow = Slow()
    slow.go_on.set()
    store = WrittenLater(slow)
    await store.put(some(*"abcde", size=3 * 2**20))
    await written(store)
    assert slow.batches == [["a", "b"], ["c", "d"], ["e"]]


async def test_what_does_not_fit_is_dropped_from_the_end_counted_and_told_once(
    seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    slow = Slow()
    store = WrittenLater(slow, most_bytes=35, observer=seen)
    for _ in range(3):
        await store.put(some(*"abcde"))
    assert seen.outcomes == {("put", "error"): 3}
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    slow.go_on.set()
    await written(store)
    assert slow.batches == [["a", "b", "c"]]
    await store.put(some("d", "e"))  # there is room again
    await written(store)
    assert await have(store, list("abcde"))
    assert len(caplog.records) == 1


async def test_the_end_waits_for_what_waits_but_not_for_long(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    store = WrittenLater(slow)
    await store.put(some("a"))
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    assert not slow.closed
    slow.go_on.set()
    await closing
    assert slow.batches == [["a"]] and slow.closed
    await store.put(some("b"))  # too late
    assert store._writer is None

    stuck = Slow()
    store = WrittenLater(stuck, drain=0.01)
    await store.put(some(*"abcde", size=3 * 2**20))
    await store.close()
    assert stuck.batches == [] and stuck.closed
    assert "3 blocks are lost" in caplog.text
