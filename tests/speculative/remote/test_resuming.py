"""A session goes on on another connection in whatever state it is, for its owner alone and for as long as it is kept."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from speculative.remote import frames as f
from speculative.remote.packing import pack_tokens
from speculative.request import Request
from tests.speculative.conftest import MakeEngine, request
from tests.speculative.remote.conftest import Gate
from tests.speculative.remote.edges import Connection, Server, Text, write
from tests.speculative.remote.test_verifier import GREEDY, begun, text_of

SHORT = request("a", [5, 9, 2], max_tokens=20, **GREEDY)
LONG = request("a", list(range(3, 40)), max_tokens=20, **GREEDY)


async def gone_on(server: Server, text: Text, owner: str = "") -> Connection:
    """A new connection on which a text has been resumed."""
    connection = await server.greeted(owner)
    connection.tell(text.resume(5))
    return connection


async def test_while_the_prompt_is_read(server: Server, make_engine: MakeEngine, gate: Gate) -> None:
    text = text_of(make_engine, replace(LONG, params=replace(LONG.params, prompt_logprobs=1)))
    connection = await server.greeted()
    connection.tell(text.open(0))
    text.take(await connection.hear(f.Opened))
    text.take(await connection.hear(f.Memory))
    gate.close()
    await connection.cut()
    connection = await gone_on(server, text)
    text.take(await connection.hear(f.Opened))
    gate.open()
    await write(connection, [text])
    assert text.output == text.expected
    assert [each.token_id for each in text.prompt_logprobs] == list(text.request.prompt_token_ids[1:])
    await connection.close()


async def test_between_steps(server: Server, make_engine: MakeEngine) -> None:
    text = text_of(make_engine, SHORT)
    connection = await begun(server, text)
    for _ in range(3):
        await connection.cut()
        connection = await gone_on(server, text)
        opened = await connection.hear(f.Opened)
        assert (opened.length, opened.step) == (len(text.tokens), text.step)
        text.take(opened)
        result = await connection.hear(f.Result)
        assert (result.step, result.tokens, result.memory) == (text.step, b"", b"")
        text.take(result)
        length = len(text.tokens)
        await write(connection, [text], until=lambda length=length: len(text.tokens) > length and not text.trees)
    await write(connection, [text])
    assert text.output == text.expected
    await connection.close()


async def test_while_a_tree_is_verified_others_that_wait_were_never_seen(
    server: Server, make_engine: MakeEngine, gate: Gate
) -> None:
    text = text_of(make_engine, SHORT)
    connection = await begun(server, text)
    gate.close()
    connection.tell(*(f.Verify(0, text.step + place, len(text.tokens)) for place in (1, 2, 3)), f.Ping(1))
    await connection.hear(f.Pong)
    await connection.cut()
    step = text.step
    connection = await gone_on(server, text)
    gate.open()
    opened = await connection.hear(f.Opened)
    assert (opened.length, opened.step) == (len(text.tokens) + 1, step + 1)
    text.take(opened)
    text.take(await connection.hear(f.Result))
    await write(connection, [text])
    assert text.output == text.expected
    await connection.close()


async def test_after_the_end_with_its_result_lost_and_again(server: Server, make_engine: MakeEngine) -> None:
    text = text_of(make_engine, SHORT)
    connection = await begun(server, text)
    connection.reads.clear()
    connection.tell(f.Verify(0, text.step + 1, len(text.tokens), pack_tokens(text.expected[len(text.output) :])))
    while next(iter(server.registry._sessions.values())).finish_reason is None:
        connection.tell(f.Ping(1))
        await asyncio.sleep(0.001)
    await connection.cut()
    length = len(text.tokens)
    for _ in range(2):
        connection = await gone_on(server, text)
        text.take(await connection.hear(f.Opened))
        result = await connection.hear(f.Result)
        assert result.finish_reason == "length" and result.first == length
        await connection.cut()
    text.take(result)
    assert text.output == text.expected
    connection = await gone_on(server, text)
    await connection.hear(f.Opened)
    assert (await connection.hear(f.Result)).finish_reason == "length"
    connection.tell(f.Cancel(5))
    assert await connection.hear(f.Closed) == f.Closed(5, "finished")
    await connection.close()
    assert server.observer.counts["resumed"] == 3


async def test_a_connection_that_still_stands_is_told(server: Server, make_engine: MakeEngine) -> None:
    text = text_of(make_engine, SHORT)
    first = await begun(server, text)
    second = await gone_on(server, text)
    assert await first.hear(f.Closed) == f.Closed(0, "moved")
    first.tell(f.Verify(0, text.step + 1, len(text.tokens)), f.Ping(3))  # it may not have known yet
    assert await first.hear() == f.Pong(3)
    await write(second, [text])
    assert text.output == text.expected
    await first.close()
    await second.close()


async def test_one_that_does_not_read_holds_nobody_up(server: Server, make_engine: MakeEngine) -> None:
    text = text_of(make_engine, SHORT)
    stuck = await begun(server, text)
    stuck.reads.clear()
    connection = await gone_on(server, text)
    await write(connection, [text])
    assert text.output == text.expected
    await connection.close()
    await stuck.cut()


@pytest.mark.parametrize("stranger", ["another key", "another token"])
async def test_only_who_opened_it_and_knows_its_token_may(server: Server, make_engine: MakeEngine, stranger: str) -> None:
    text = text_of(make_engine, SHORT)
    connection = await server.greeted("owner")
    connection.tell(text.open(0))
    await write(connection, [text], until=lambda: len(text.output) > 0 and not text.trees)
    other = await server.greeted("owner" if stranger == "another token" else "thief")
    resume = text.resume(7)
    other.tell(resume if stranger == "another key" else f.Resume(7, b"guessed", resume.length, 0, 0))
    error = await other.hear(f.Error)
    assert (error.code, error.session, error.retryable) == ("cannot_resume", 7, False)
    await other.close()
    text.number, text.is_open = 0, True
    await write(connection, [text])
    assert text.output == text.expected
    await connection.close()


@pytest.mark.parametrize(
    "claim", [{"length": 60}, {"length": 2, "memory_from": 0}, {"text_length": 999}, {"memory_from": 0}], ids=str
)
async def test_what_cannot_be_told_is_not_resumed(server: Server, make_engine: MakeEngine, claim: dict[str, int]) -> None:
    text = text_of(make_engine, SHORT)
    connection = await begun(server, text)
    await write(connection, [text], until=lambda: len(text.output) > 8 and not text.trees)
    other = await server.greeted()
    true = text.resume(7)
    values = {name: getattr(true, name) for name in ("length", "memory_from", "text_length")} | claim
    other.tell(f.Resume(7, text.token, **values))
    error = await other.hear(f.Error)
    assert (error.code, error.session) == ("cannot_resume", 7)
    text.number, text.is_open = 0, True  # all is as it was
    await write(connection, [text])
    assert text.output == text.expected
    await connection.close()
    await other.close()


async def test_before_it_is_open_nobody_could_and_it_ends(server: Server, make_engine: MakeEngine, gate: Gate) -> None:
    gate.close()
    connection = await server.greeted()
    connection.tell(text_of(make_engine, SHORT).open(0), f.Ping(1))
    await connection.hear(f.Pong)
    await connection.cut()
    assert len(server.registry) == 0


@pytest.mark.parametrize("state", ["ended", "waiting for its edge", "without an edge", "verifying without an edge"])
async def test_what_nobody_comes_for_is_forgotten(engine, make_engine: MakeEngine, gate: Gate, state: str) -> None:
    server = Server(engine, idle_seconds=0.1)
    text = text_of(make_engine, SHORT)
    connection = await begun(server, text)
    if state == "ended":
        await write(connection, [text])
    if state.startswith("verifying"):
        gate.close()
        connection.tell(f.Verify(0, text.step + 1, len(text.tokens)), f.Ping(1))
        await connection.hear(f.Pong)
    if state.endswith("without an edge"):
        await connection.cut()
        while len(server.registry):
            await asyncio.sleep(0.001)
        connection = await gone_on(server, text)
        assert (await connection.hear(f.Error)).code == "cannot_resume"
    else:
        assert await connection.hear(f.Closed) == f.Closed(0, "idle")
    gate.open()
    await connection.close()
    await server.assert_nothing_is_left()


async def test_what_is_forgotten_is_opened_anew_with_its_output(server: Server, make_engine: MakeEngine) -> None:
    sampled: Request = request("a", [5, 9, 2], max_tokens=30, temperature=0.9, seed=8, presence_penalty=0.5)
    text = text_of(make_engine, sampled)
    connection = await begun(server, text)
    await write(connection, [text], until=lambda: len(text.output) > 9)
    connection.tell(f.Cancel(0))
    await connection.hear_last(f.Closed)
    again = Text(
        replace(sampled, output_token_ids=tuple(text.output), text_length=len(text.text)), text.expected, random.Random(1), 2
    )
    connection.tell(again.open(1))
    await write(connection, [again])
    assert again.output == text.expected
    await connection.close()
