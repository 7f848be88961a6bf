"""A server's sessions over a real engine: every token once and in order, whatever becomes of trees and connections."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import pytest

from speculative.remote import frames as f
from speculative.remote.limits import Limits
from speculative.remote.packing import pack_rows, pack_tokens, unpack_tokens
from speculative.request import Request, RequestOutput
from tests.speculative.conftest import N0, MakeEngine, request, run, tokens
from tests.speculative.remote.conftest import Gate
from tests.speculative.remote.edges import Connection, Server, Text, write
from tests.speculative.test_engine import mixed_requests

GREEDY = {"temperature": 0.0}


def plain(make_engine: MakeEngine, each: Request) -> list[int]:
    """What plain decoding says."""
    (ids,) = tokens(run(make_engine(N0, "none"), [replace(each, output_token_ids=(), text_length=0)])).values()
    return ids


def text_of(make_engine: MakeEngine, each: Request, seed: int = 0, in_flight: int = 1) -> Text:
    return Text(each, plain(make_engine, each), random.Random(seed), in_flight)


async def begun(server: Server, text: Text, number: int = 0, **hello: int) -> Connection:
    """A connection on which a text has its first token."""
    connection = await server.greeted(**hello)
    connection.tell(text.open(number))
    await write(connection, [text], until=lambda: len(text.output) > 0)
    while text.trees:
        text.take(await connection.hear())
    return connection


@pytest.mark.parametrize("in_flight", [1, 2, 4])
async def test_texts_are_those_of_plain_decoding(server: Server, make_engine: MakeEngine, in_flight: int) -> None:
    texts = [text_of(make_engine, each, seed, in_flight) for seed, each in enumerate(mixed_requests())]
    connection = await server.greeted()
    for number, text in enumerate(texts):
        connection.tell(text.open(number))
    await write(connection, texts)
    assert [text.output for text in texts] == [text.expected for text in texts]
    assert sum(text.num_accepted for text in texts) > 10
    for text in texts:
        connection.tell(f.Cancel(text.number))
        assert await connection.hear(f.Closed) == f.Closed(text.number, "finished")
    await connection.close()
    assert server.observer.counts["connections"] == 0
    assert server.observer.counts["sent"] == connection.sent


@pytest.mark.parametrize("seed", range(6))
async def test_no_token_is_lost_or_doubled_whenever_connections_are(server: Server, make_engine: MakeEngine, seed: int) -> None:
    chance = random.Random(seed)
    requests = [
        replace(each, params=replace(each.params, logprobs=chance.choice([None, 2]))) for each in mixed_requests(prompt_logprobs=1)
    ]
    texts = [Text(each, plain(make_engine, each), chance, chance.choice([1, 3])) for each in requests]
    connection = await server.greeted()
    for number, text in enumerate(texts):
        connection.tell(text.open(number))
    cuts = 0
    while any(text.finish_reason is None for text in texts):
        left = chance.randint(1, 25)

        def enough() -> bool:
            nonlocal left
            left -= 1
            return left < 0 and all(text.token for text in texts)

        await write(connection, [text for text in texts if text.finish_reason is None], enough)
        await connection.cut()
        cuts += 1
        connection = await server.greeted()
        left_over = [text for text in texts if text.finish_reason is None]
        for place, text in enumerate(chance.sample(left_over, len(left_over))):
            connection.tell(text.resume(place))
    assert cuts > 1
    for text in texts:
        assert text.output == text.expected
        if text.request.params.logprobs is not None:
            assert [each.token_id for each in text.logprobs] == text.expected
        assert [each.token_id for each in text.prompt_logprobs] == list(text.request.prompt_token_ids[1:])
    await connection.close()


async def test_the_text_comes_in_pieces_that_make_it_whole(server: Server, make_engine: MakeEngine) -> None:
    each = request("a", [5, 9, 2], max_tokens=40, **GREEDY)
    outputs = run(make_engine(N0, "none"), [each])["a"]
    text = text_of(make_engine, each)
    connection = await begun(server, text)
    await connection.cut()
    connection = await server.greeted()
    connection.tell(text.resume(3))
    await write(connection, [text])
    assert text.text == "".join(output.text_delta for output in outputs)
    await connection.close()


async def test_what_a_tree_foretells_is_told_by_its_rows(server: Server, make_engine: MakeEngine) -> None:
    text = text_of(make_engine, request("a", [5, 9, 2], max_tokens=30, **GREEDY))
    connection = await begun(server, text)
    known = len(text.tokens)
    one, two, three = text.expected[len(text.output) : len(text.output) + 3]
    wrong = (one + 1) % 160
    connection.tell(f.Verify(0, text.step + 1, known, pack_tokens([wrong, one, two, wrong, three]), pack_rows([0, 0, 2, 1, 3])))
    result = await connection.hear(f.Result)
    assert result.accepted == pack_rows([2, 3, 5]) and unpack_tokens(result.tokens)[:3] == [one, two, three]
    assert (result.stats.batch_size, result.stats.num_target_calls > 1) == (1, True)
    await connection.close()


async def test_a_tree_that_its_text_has_left_costs_no_pass(server: Server, make_engine: MakeEngine) -> None:
    text = text_of(make_engine, request("a", [5, 9, 2], max_tokens=30, **GREEDY))
    connection = await begun(server, text)
    known, step = len(text.tokens), text.step
    wrong = (text.expected[len(text.output)] + 1) % 160
    connection.tell(
        f.Verify(0, step + 1, known, pack_tokens([wrong])),
        f.Verify(0, step + 2, known, pack_tokens([wrong, 5])),
        f.Verify(0, step + 3, known, pack_tokens(text.expected[len(text.output) : len(text.output) + 1])),
    )
    first, left, grafted = [await connection.hear(f.Result) for _ in range(3)]
    assert [each.step for each in (first, left, grafted)] == [step + 1, step + 2, step + 3]
    assert len(first.tokens) == len(grafted.tokens) == 4 and not left.tokens and not grafted.accepted
    assert first.stats.num_target_calls == left.stats.num_target_calls == grafted.stats.num_target_calls - 1
    assert server.observer.counts["left"] == 1
    await connection.close()


async def test_a_tree_may_come_before_the_first_token(server: Server, make_engine: MakeEngine) -> None:
    text = text_of(make_engine, request("a", list(range(3, 40)), max_tokens=30, **GREEDY))
    connection = await server.greeted()
    connection.tell(text.open(0), f.Verify(0, 1, 37, pack_tokens(text.expected[:4])))
    heard = [await connection.hear() for _ in range(8)]
    assert [type(each) for each in heard] == [f.Opened, *[f.Memory] * 5, f.Result, f.Result]
    assert heard[-1].accepted == pack_rows([2, 3, 4])  # type: ignore[union-attr]
    assert heard[-1].step == 1  # type: ignore[union-attr]
    await connection.close()


async def test_a_chain_may_be_longer_than_what_is_left_to_write(server: Server, make_engine: MakeEngine) -> None:
    text = text_of(make_engine, request("a", [5, 9, 2], max_tokens=40, **GREEDY))
    connection = await server.greeted()
    assert connection.limits.tree_nodes < 60
    connection.tell(text.open(0), f.Verify(0, 1, 3, pack_tokens([*text.expected, *[7] * 60])))
    while not (result := await connection.hear_last(f.Result)).finish_reason:
        pass
    assert result.first + len(result.tokens) // 4 == 43
    await connection.close()


async def test_a_repeated_step_adds_nothing_and_none_may_be_left_out(server: Server, make_engine: MakeEngine, gate: Gate) -> None:
    text = text_of(make_engine, request("a", [5, 9, 2], max_tokens=30, **GREEDY))
    connection = await begun(server, text)
    step = text.step + 1
    tree = f.Verify(0, step, len(text.tokens), pack_tokens([1, 2]))
    gate.close()
    connection.tell(tree, tree, f.Ping(0))
    await connection.hear(f.Pong)
    gate.open()
    assert (await connection.hear(f.Result)).tokens
    connection.tell(tree)
    repeated = await connection.hear(f.Result)
    assert (repeated.step, repeated.tokens, repeated.finish_reason) == (step, b"", None)
    assert server.observer.counts["repeated"] == 1
    connection.tell(replace_step(tree, step + 2))
    refused = await connection.hear_last(f.Error)
    assert (refused.code, refused.session, refused.step) == ("out_of_order", 0, step + 2)
    connection.tell(replace_step(tree, step + 1))  # the session goes on
    assert (await connection.hear(f.Result)).step == step + 1
    await connection.close()


def replace_step(tree: f.Verify, step: int) -> f.Verify:
    return f.Verify(tree.session, step, tree.length, tree.tokens, tree.parents)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (lambda length, step: [f.Verify(0, step, length + 1)], "out_of_order"),
        (lambda length, step: [f.Verify(0, step, length, pack_tokens([1, 2]), pack_rows([0, 2]))], "invalid_field"),
        (lambda length, step: [f.Verify(0, step, length, pack_tokens([160]))], "invalid_field"),
        (lambda length, step: [f.Verify(0, step, length, pack_tokens([1] * 40), pack_rows([0] * 40))], "limit_exceeded"),
        (lambda length, step: [f.Verify(0, step, 120, pack_tokens([1] * 40))], "invalid_field"),
    ],
)
async def test_a_wrong_tree_is_refused_and_its_session_goes_on(server: Server, make_engine: MakeEngine, wrong, code) -> None:
    text = text_of(make_engine, request("a", [5, 9, 2], max_tokens=30, **GREEDY))
    connection = await begun(server, text)
    connection.tell(*wrong(len(text.tokens), text.step + 1))
    refused = await connection.hear(f.Error)
    assert (refused.code, refused.session, refused.step) == (code, 0, text.step + 1)
    assert server.observer.counts[code] == 1
    await write(connection, [text])
    assert text.output == text.expected
    await connection.close()


async def test_more_trees_in_flight_than_agreed_are_refused(server: Server, make_engine: MakeEngine, gate: Gate) -> None:
    text = text_of(make_engine, request("a", [5, 9, 2], max_tokens=30, **GREEDY))
    connection = await begun(server, text)
    gate.close()
    connection.tell(*(f.Verify(0, text.step + 1 + place, len(text.tokens)) for place in range(5)))
    refused = await connection.hear(f.Error)
    assert (refused.code, refused.step) == ("limit_exceeded", text.step + 5)
    gate.open()
    results = [await connection.hear(f.Result) for _ in range(4)]
    assert [each.step - text.step for each in results] == [1, 2, 3, 4]
    await connection.close()


async def test_output_that_was_written_elsewhere_is_gone_on_with(server: Server, make_engine: MakeEngine) -> None:
    each = request("a", [5, 9, 2], max_tokens=30, temperature=0.8, seed=3, frequency_penalty=0.5)
    expected = plain(make_engine, each)
    text = Text(replace(each, output_token_ids=tuple(expected[:11])), expected, random.Random(0))
    connection = await server.greeted()
    connection.tell(text.open(0))
    await write(connection, [text])
    assert text.output == expected
    await connection.close()


async def test_a_drawn_seed_is_told_and_gives_the_same_again(server: Server, make_engine: MakeEngine) -> None:
    connection = await server.greeted()
    connection.tell(f.Open(0, pack_tokens([5, 9]), f.Sampling(max_tokens=12, ignore_eos=True)))
    seed = (await connection.hear(f.Opened)).seed
    expected = plain(make_engine, request("a", [5, 9], max_tokens=12, seed=seed))
    said, step = [], 0
    while (result := await connection.hear_last(f.Result)).finish_reason is None:
        said += unpack_tokens(result.tokens)
        step += 1
        connection.tell(f.Verify(0, step, 2 + len(said)))
    assert [*said, *unpack_tokens(result.tokens)] == expected
    await connection.close()


async def test_without_speculation_no_memory_comes(server: Server, make_engine: MakeEngine) -> None:
    text = text_of(make_engine, request("a", list(range(3, 40)), max_tokens=10, speculative=False, **GREEDY))
    connection = await server.greeted()
    connection.tell(text.open(0))
    await write(connection, [text])
    assert text.memory_end is None and text.output == text.expected
    await connection.close()


async def test_only_the_prompt_may_be_asked_for(server: Server) -> None:
    connection = await server.greeted()
    connection.tell(f.Open(0, pack_tokens(range(3, 40)), f.Sampling(max_tokens=0, prompt_logprobs=1)))
    result = await connection.hear_last(f.Result)
    while result.finish_reason is None:
        result = await connection.hear_last(f.Result)
    assert result.finish_reason == "length" and not result.tokens
    await connection.close()


@pytest.mark.parametrize("state", ["queued", "reading", "thinking", "verifying", "ended"])
async def test_cancelling_frees_everything_at_once(server: Server, make_engine: MakeEngine, gate: Gate, state: str) -> None:
    text = text_of(make_engine, request("a", list(range(3, 40)), max_tokens=8, **GREEDY))
    if state in ("queued", "reading"):
        connection = await server.greeted()
        if state == "queued":
            gate.close()
        connection.tell(text.open(0))
        if state == "reading":
            await connection.hear(f.Opened)
    else:
        connection = await begun(server, text)
    if state == "ended":
        await write(connection, [text])
    if state == "verifying":
        gate.close()
        connection.tell(f.Verify(0, text.step + 1, len(text.tokens)))
    connection.tell(f.Cancel(0))
    closed = await connection.hear_last(f.Closed)
    assert closed == f.Closed(0, "finished" if state == "ended" else "cancelled")
    assert len(server.registry) == 0
    gate.open()
    again = replace(text.request, request_id="b")
    connection.tell(Text(again, text.expected, random.Random(0)).open(0))  # its number is free
    await connection.hear_last(f.Result)
    connection.tell(f.Cancel(0), f.Cancel(0), f.Verify(0, 1, 38))  # what crosses the end of a session is dropped
    assert await connection.hear_last(f.Closed) == f.Closed(0, "cancelled")
    connection.tell(f.Ping(7))
    assert await connection.hear() == f.Pong(7)
    await connection.close()


async def test_pings_are_answered_however_busy_the_engine_is(server: Server, make_engine: MakeEngine, gate: Gate) -> None:
    text = text_of(make_engine, request("a", [5, 9, 2], max_tokens=8, **GREEDY))
    connection = await begun(server, text)
    gate.close()
    connection.tell(f.Verify(0, text.step + 1, len(text.tokens)), f.Ping(1), f.Ping(2))
    assert [await connection.hear(), await connection.hear()] == [f.Pong(1), f.Pong(2)]
    gate.open()
    await connection.close()


async def test_a_step_that_fails_ends_its_sessions(server: Server, make_engine: MakeEngine, gate: Gate) -> None:
    text = text_of(make_engine, request("a", [5, 9, 2], max_tokens=8, **GREEDY))
    connection = await begun(server, text)
    gate.failing = True
    connection.tell(f.Verify(0, text.step + 1, len(text.tokens)))
    error = await connection.hear(f.Error)
    assert (error.code, error.retryable, error.session, error.step) == ("engine_failed", True, 0, None)
    gate.failing = False
    again = Text(replace(text.request, output_token_ids=tuple(text.output)), text.expected, random.Random(0))
    connection.tell(again.open(0))
    await write(connection, [again])
    assert again.output == text.expected
    await connection.close()


async def test_shutting_down_ends_what_is_left(server: Server, make_engine: MakeEngine) -> None:
    text = text_of(make_engine, request("a", [5, 9, 2], max_tokens=8, **GREEDY))
    connection = await begun(server, text)
    await server.registry.drain(0.05)
    assert await connection.hear(f.Closed) == f.Closed(0, "shutdown")
    await asyncio.wait_for(connection.ended, 30)
    refused = server.connect()
    refused.tell(f.Hello((1,), server.engine.info.pair, ("int8",)))
    assert (await refused.hear(f.Error)).code == "not_ready"
    await refused.ended


async def test_shutting_down_lets_texts_end(server: Server, make_engine: MakeEngine) -> None:
    text = text_of(make_engine, request("a", [5, 9, 2], max_tokens=30, **GREEDY))
    connection = await begun(server, text)
    draining = asyncio.create_task(server.registry.drain(30))
    await asyncio.sleep(0)
    connection.tell(f.Open(1, pack_tokens([1]), f.Sampling()))
    refused = await connection.hear(f.Error)
    assert (refused.code, refused.session) == ("not_ready", 1)
    await write(connection, [text])
    assert text.output == text.expected
    await draining
    await connection.ended


async def test_replicas_that_give_way_to_another_pair_are_noticed_at_the_next_text(server: Server, make_engine: MakeEngine) -> None:
    text = text_of(make_engine, request("a", [5, 9, 2], max_tokens=8, **GREEDY))
    connection = await begun(server, text)
    engine = server.engine._engine
    assert engine is not None
    engine.info = replace(engine.info, pair="another")
    connection.tell(f.Open(1, pack_tokens([1]), f.Sampling()))
    error = await connection.hear(f.Error)
    assert (error.code, error.session, error.retryable) == ("wrong_model", 1, False)
    await write(connection, [text])
    assert text.output == text.expected, "what was begun goes on"
    await connection.close()


async def test_a_connection_that_is_cancelled_twice_is_counted_no_more(server: Server) -> None:
    connection = await server.greeted()
    connection.reads.clear()
    connection.tell(f.Ping(1))  # whose answer has nowhere to go
    for _ in range(2):
        await asyncio.sleep(0.01)
        connection.ended.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connection.ended
    assert server.observer.counts["connections"] == 0
    connection.reads.set()


async def test_a_text_that_has_ended_takes_nothing_more_of_what_runs_it(server: Server, make_engine: MakeEngine) -> None:
    """Some answer a cancellation with an output: see `waiting.ended`."""
    swallowed: list[bool] = []

    async def stubborn(asked: Request) -> AsyncGenerator[RequestOutput, None]:
        async with aclosing(server.generate(asked)) as outputs:
            async for output in outputs:
                yield output
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    assert not swallowed
                    swallowed.append(True)

    connection = server.connect(generate=stubborn)
    connection.tell(f.Hello((1,), server.engine.info.pair, ("int8",)))
    connection.limits = Limits.of(await connection.hear(f.Welcome), 2**20)
    connection.tell(f.Open(0, pack_tokens(range(3, 40)), f.Sampling(max_tokens=1)))
    await connection.hear(f.Opened)
    await connection.hear(f.Memory)
    connection.tell(f.Cancel(0))
    assert await connection.hear(f.Closed) == f.Closed(0, "cancelled")
    if running := set(server.registry._tasks):
        assert not (await asyncio.wait(running, timeout=10))[1], "it goes on for nobody"
    assert swallowed and not connection.heard()
    await connection.close()
