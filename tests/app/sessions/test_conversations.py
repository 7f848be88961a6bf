"""What is carried between an engine and a store, and when."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import pytest

from app.sessions.conversations import WORTHWHILE, Conversations
from app.sessions.memory_blocks import MemoryBlocks
from speculative.prefix_cache import BLOCK_TOKENS, extend_keys
from speculative.request import Request, SamplingParams
from tests.app.fakes import FakeEngine

DAY = 86_400.0
TEXT = tuple(range(20 * BLOCK_TOKENS))


class Store(MemoryBlocks):
    """Notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__(2**20, DAY)
        self.asked: list[int] = []
        self.given: list[int] = []

    async def get(self, keys: Sequence[str]) -> list[bytes]:
        self.asked.append(len(keys))
        return await super().get(keys)

    async def put(self, blocks: Mapping[str, bytes]) -> None:
        self.given.append(len(blocks))
        await super().put(blocks)


def keys(text: Sequence[int], salt: str = "") -> list[bytes]:
    found: list[bytes] = []
    extend_keys(found, text, salt)
    return found


def request(text: Sequence[int], salt: str = "", **params: object) -> Request:
    return Request("r", tuple(text), SamplingParams(**params), cache_salt=salt)  # type: ignore[arg-type]


def engine_that_knows(text: Sequence[int], salt: str = "") -> FakeEngine:
    return FakeEngine(blocks={key: b"block of " + key for key in keys(text, salt)})


@pytest.fixture
def store() -> Store:
    return Store()


async def stored(store: Store, engine: FakeEngine, prompt: Sequence[int], generated: Sequence[int], salt: str = "") -> None:
    conversations = Conversations(engine, store)
    conversations.keep(request(prompt, salt), generated)
    await conversations.close(10)


async def test_a_text_is_stored_when_it_ends_and_restored_elsewhere(store: Store) -> None:
    here, there = engine_that_knows(TEXT), FakeEngine()
    await stored(store, here, TEXT[:100], TEXT[100:])
    await Conversations(there, store).restore([request([*TEXT, 1])])
    assert there.blocks == here.blocks


async def test_only_what_is_new_is_stored(store: Store) -> None:
    await stored(store, engine_that_knows(TEXT), TEXT[: 10 * BLOCK_TOKENS], ())
    await stored(store, engine_that_knows(TEXT), TEXT[: 10 * BLOCK_TOKENS], TEXT[10 * BLOCK_TOKENS :])
    assert store.given == [10, 10]


async def test_the_store_is_asked_for_what_the_engine_does_not_know_and_where_that_is_worth_it(store: Store) -> None:
    await stored(store, engine_that_knows(TEXT), TEXT, ())
    for known, asked in ((0, [20]), (12, [8]), (20 - WORTHWHILE, [WORTHWHILE]), (21 - WORTHWHILE, []), (20, [])):
        engine = engine_that_knows(TEXT[: known * BLOCK_TOKENS])
        store.asked.clear()
        await Conversations(engine, store).restore([request([*TEXT, 1])])
        assert store.asked == asked
        assert engine.known_blocks(keys(TEXT)) == (20 if asked else known)


async def test_choices_of_a_prompt_are_restored_once(store: Store) -> None:
    await Conversations(FakeEngine(), store).restore([request(TEXT)] * 3 + [request(TEXT, "salted")])
    assert store.asked == [19, 19]  # the last token is always computed, and so its block is


async def test_a_prompt_whose_log_probabilities_are_wanted_is_read(store: Store) -> None:
    await Conversations(FakeEngine(), store).restore([request(TEXT, prompt_logprobs=0)])
    assert store.asked == []


async def test_tenants_do_not_find_each_others(store: Store) -> None:
    await stored(store, engine_that_knows(TEXT, "mine"), TEXT, (), "mine")
    for salt, found in (("mine", 20), ("yours", 0), ("", 0)):
        engine = FakeEngine()
        await Conversations(engine, store).restore([request([*TEXT, 1], salt)])
        assert engine.known_blocks(keys(TEXT, salt)) == found


async def test_what_cannot_be_used_is_left_and_logged(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    await stored(store, FakeEngine(blocks=dict.fromkeys(keys(TEXT), b"garbage")), TEXT, ())
    engine = FakeEngine()
    with caplog.at_level(logging.WARNING, "moaserve.sessions"):
        await Conversations(engine, store).restore([request([*TEXT, 1])])
    assert engine.blocks == {}
    assert "cannot be used" in caplog.text


async def test_an_engine_that_has_ended_stores_nothing_and_nobody_minds(store: Store) -> None:
    engine = engine_that_knows(TEXT)
    engine.ready = False
    await stored(store, engine, TEXT, ())
    assert store.given == []
