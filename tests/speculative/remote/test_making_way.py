"""Silent edges keep slots for as long as nobody else needs them."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace

import pytest

from speculative.remote import frames as f
from speculative.remote.packing import pack_tokens
from speculative.remote.registry import SILENT_SECONDS
from speculative.request import RequestOutput
from tests.speculative.conftest import MakeEngine, request
from tests.speculative.remote.conftest import Gate
from tests.speculative.remote.edges import PATIENCE, Connection, Server, Text, write
from tests.speculative.remote.test_verifier import GREEDY, begun, text_of

SLOTS = 4


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at the clock but the test."""
    monkeypatch.setattr("speculative.remote.registry.LOOK_SECONDS", 3600.0)


async def in_all_slots(server: Server, make_engine: MakeEngine) -> tuple[Connection, list[Text]]:
    """A connection and its texts, which have begun one after the other and have every slot; their edge owes each of them a tree."""
    connection = await server.greeted()
    texts = [text_of(make_engine, request(f"edge {n}", [5, 9, 2 + n], max_tokens=20, **GREEDY)) for n in range(SLOTS)]
    for number, text in enumerate(texts):
        connection.tell(text.open(number))
        text.take(await connection.hear(f.Opened))
        text.take(await connection.hear_last(f.Result))
    return connection, texts


async def asked(server: Server) -> asyncio.Task[list[RequestOutput]]:
    """A request of somebody else's, which waits for a slot."""

    before = server.engine.status().num_waiting

    async def ask() -> list[RequestOutput]:
        other = request(f"other {before}", [7, 8], max_tokens=3, **GREEDY)
        return [output async for output in server.engine.generate(other)]

    task = asyncio.create_task(ask())
    while server.engine.status().num_waiting == before:
        await asyncio.sleep(0.001)
    return task


def anew(text: Text) -> Text:
    """The same text at an edge that has been told that it is forgotten, and has what was told before."""
    given = replace(text.request, output_token_ids=tuple(text.output), text_length=len(text.text))
    return Text(given, text.expected, random.Random(1))


async def test_requests_get_the_slots_of_silent_edges_which_lose_nothing(
    server: Server, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculative.remote.registry.LOOK_SECONDS", 0.01)
    monkeypatch.setattr("speculative.remote.registry.SILENT_SECONDS", 0.0)
    connection, texts = await in_all_slots(server, make_engine)
    outputs = await asyncio.wait_for(await asked(server), PATIENCE / 2)
    assert outputs[-1].finish_reason == "length"
    monkeypatch.undo()
    forgotten = [each.session for each in connection.heard() if each == f.Closed(each.session, "idle")]
    assert forgotten
    for number in forgotten:
        texts[number] = anew(texts[number])
        connection.tell(texts[number].open(number))
    await write(connection, texts)
    assert [text.output for text in texts] == [text.expected for text in texts]
    await connection.close()


async def test_where_nobody_waits_all_stay(server: Server, make_engine: MakeEngine, seldom: None) -> None:
    connection, texts = await in_all_slots(server, make_engine)
    server.registry.make_way(time.monotonic() + 2 * SILENT_SECONDS)
    await write(connection, texts)
    assert [text.output for text in texts] == [text.expected for text in texts]
    await connection.close()


async def test_as_many_as_wait_are_forgotten_the_longest_silent_first(
    server: Server, make_engine: MakeEngine, seldom: None
) -> None:
    connection, texts = await in_all_slots(server, make_engine)
    connection.tell(texts[0].draft())
    texts[0].take(await connection.hear(f.Result))
    others = [await asked(server), await asked(server)]
    server.registry.make_way(time.monotonic())
    assert not connection.heard(), "a round trip takes its time"
    server.registry.make_way(time.monotonic() + SILENT_SECONDS)
    assert [await connection.hear(), await connection.hear()] == [f.Closed(1, "idle"), f.Closed(2, "idle")]
    await asyncio.wait_for(asyncio.gather(*others), PATIENCE)
    rest = [texts[0], texts[3]]
    await write(connection, rest)
    assert [text.output for text in rest] == [text.expected for text in rest]
    await connection.close()


async def test_who_says_nothing_new_is_silent(server: Server, make_engine: MakeEngine, seldom: None) -> None:
    text = text_of(make_engine, request("a", [5, 9, 2], max_tokens=20, **GREEDY))
    connection = await begun(server, text)
    (session,) = server.registry._sessions.values()
    now = time.monotonic()
    before = session.silent_for(now)
    connection.tell(f.Verify(0, text.step, len(text.tokens)))
    assert not (await connection.hear(f.Result)).tokens
    assert session.silent_for(now) == before, "a step that was verified before brings nothing"
    await connection.cut()
    assert session.silent_for(now) == before
    connection = await server.greeted()
    connection.tell(text.resume(0))
    text.take(await connection.hear(f.Opened))
    text.take(await connection.hear(f.Result))
    assert session.silent_for(now) == before
    await write(connection, [text])
    assert session.silent_for(time.monotonic()) == 0, "it has ended, and its slot is free"
    await connection.close()


async def test_who_does_not_read_is_silent_whatever_it_sends(
    server: Server, make_engine: MakeEngine, gate: Gate, seldom: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = text_of(make_engine, request("a", [5, 9, 2], max_tokens=20, **GREEDY))
    connection = await begun(server, text)
    (session,) = server.registry._sessions.values()
    length, following = len(text.tokens), pack_tokens(text.expected[len(text.output) :][:1])
    gate.close()
    connection.tell(f.Verify(0, text.step + 1, length), f.Verify(0, text.step + 2, length, following), f.Ping(1))
    await connection.hear(f.Pong)
    assert session.silent_for(time.monotonic()) == 0
    monkeypatch.setattr("speculative.remote.outgoing.MOST_WAITING", 0)
    connection.reads.clear()
    gate.open()
    while session._blocked is None:
        await asyncio.sleep(0.001)
    assert session.step == text.step + 1 and session.silent_for(time.monotonic()) > 0
    await connection.cut()


async def test_a_tree_that_waits_for_the_engine_is_no_silence(
    server: Server, make_engine: MakeEngine, gate: Gate, seldom: None
) -> None:
    connection, texts = await in_all_slots(server, make_engine)
    other = await asked(server)
    gate.close()
    connection.tell(texts[0].draft(), f.Ping(1))
    await connection.hear(f.Pong)
    server.registry.make_way(time.monotonic() + 2 * SILENT_SECONDS)
    assert await connection.hear() == f.Closed(1, "idle")
    gate.open()
    await asyncio.wait_for(other, PATIENCE)
    await write(connection, [texts[0]])
    assert texts[0].output == texts[0].expected
    await connection.close()


async def test_without_a_connection_too_and_its_edge_is_told_to_open_anew(
    server: Server, make_engine: MakeEngine, seldom: None
) -> None:
    connection, texts = await in_all_slots(server, make_engine)
    await connection.cut()
    other = await asked(server)
    server.registry.make_way(time.monotonic() + 2 * SILENT_SECONDS)
    await asyncio.wait_for(other, PATIENCE)
    connection = await server.greeted()
    connection.tell(texts[0].resume(0), texts[1].resume(1))
    error = await connection.hear(f.Error)
    assert (error.code, error.session) == ("cannot_resume", 0)
    again = anew(texts[0])
    connection.tell(again.open(0))
    await write(connection, [again, texts[1]])
    assert [again.output, texts[1].output] == [again.expected, texts[1].expected]
    await connection.close()
