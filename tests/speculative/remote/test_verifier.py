"""A server's sessions over a real engine: every token once and in order, whatever becomes of trees and connections."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest

from speculative.async_engine import AsyncEngine
from speculative.request import Request
from tests.speculative.conftest import N0, MakeEngine, run, tokens
from tests.speculative.remote.edges import Server, Text, write
from tests.speculative.test_engine import mixed_requests


@pytest.fixture
async def engine(make_engine: MakeEngine) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(lambda: make_engine(N0, "moa", prefill_chunk=7, draft_window=0))
    await engine.start()
    await engine.wait_ready()
    yield engine
    await engine.stop()


@pytest.fixture
async def server(engine: AsyncEngine) -> AsyncIterator[Server]:
    server = Server(engine)
    yield server
    await server.registry.close()
    await server.assert_nothing_is_left()


def plain(make_engine: MakeEngine, each: Request) -> list[int]:
    (ids,) = tokens(run(make_engine(N0, "none"), [each])).values()
    return ids


@pytest.mark.parametrize("in_flight", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
async def test_texts_are_those_of_plain_decoding(server: Server, make_engine: MakeEngine, in_flight: int, seed: int) -> None:
    chance = random.Random(seed)
    texts = [Text(each, plain(make_engine, each), chance, in_flight) for each in mixed_requests()]
    connection = await server.greeted()
    for number, text in enumerate(texts):
        connection.tell(text.open(number))
    await write(connection, texts)
    assert [text.output for text in texts] == [text.expected for text in texts]
    assert sum(text.num_accepted for text in texts) > 10
    await connection.close()
