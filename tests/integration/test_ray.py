"""Three replicas on a local Ray cluster behind the HTTP application: one cluster for all tests."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

pytest.importorskip("ray", reason="needs the extra ray")

from app.cluster_settings import ClusterSettings
from benchmarks.replicas.asking import ask, opening
from benchmarks.replicas.hosting import Hosted, hosted
from benchmarks.replicas.measuring import chat, kill, update
from speculative.request import OfferedTree, Request, SamplingParams

pytestmark = [
    pytest.mark.integration,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("default"),  # Ray's own, of sockets and forks
]

SETTINGS = ClusterSettings(
    replicas=3, replica_cpus=0.3, dtype="float32", device="cpu", compile="off", max_num_seqs=8, num_threads=1, max_model_len=1024,
    prefix_cache_tokens=8192, prefill_chunk=128, shutdown_timeout=15,
)  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host() -> AsyncIterator[Hosted]:
    async with hosted(SETTINGS) as host:
        yield host


async def test_follow_up_turns_go_where_their_beginning_is(host: Hosted) -> None:
    chats = await chat(host, chats=12, turns=3, concurrency=4, max_tokens=32)
    assert chats.landed >= 0.95 * chats.follow_ups
    assert len({name for name in host.engine.replicas if host.engine.replicas[name].status.num_steps}) == 3, "and all have work"


async def test_texts_find_the_replica_with_the_fewest(host: Hosted) -> None:
    numbers = itertools.count(100)

    async def text_after_text() -> None:
        while True:
            assert (await ask(host.client, opening(next(numbers)), 900, 0)).error is None

    clients = [asyncio.create_task(text_after_text()) for _ in range(12)]

    async def evenly_spread() -> None:
        while {state.status.num_running for state in host.engine.replicas.values()} != {4}:
            assert not any(client.done() for client in clients), "none has failed"
            await asyncio.sleep(0.05)

    try:
        for leaving in ((0, 1, 2, 3), (4, 6, 8), (0, 5, 9, 10, 11)):  # whichever replicas their texts are at
            await asyncio.wait_for(evenly_spread(), 30)
            await cancelled(*(clients[each] for each in leaving))
            for each in leaving:
                clients[each] = asyncio.create_task(text_after_text())
        await asyncio.wait_for(evenly_spread(), 30)
    finally:
        await cancelled(*clients)


async def cancelled(*clients: asyncio.Task[None]) -> None:
    """They leave, in the middle of a text."""
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)


async def test_killed_replicas_change_no_text(host: Hosted) -> None:
    kills = await kill(host, kills=3, streams=8, max_tokens=200)
    assert kills.failovers > 0
    assert (kills.same, kills.failed) == (kills.texts, 0), kills.differences
    await host.all_ready(3)


async def test_a_stream_that_is_left_ends_at_its_replica(host: Hosted) -> None:
    body = {"messages": opening(1), "stream": True, "ignore_eos": True, "max_tokens": 900}
    async with host.client.stream("POST", "/v1/chat/completions", json=body) as response:
        await anext(response.aiter_lines())

    async def idle() -> None:
        while host.engine.status().num_running:
            await asyncio.sleep(0.05)

    await asyncio.wait_for(idle(), 30)


async def test_a_text_that_is_drafted_elsewhere_moves_with_its_trees(host: Hosted) -> None:
    tokens = tuple(host.engine.tokenizer.encode("Where can I eat in Oslo?"))
    whole = Request("whole", tokens, SamplingParams(max_tokens=40, seed=5, ignore_eos=True))
    expected = [token async for output in host.engine.generate(whole) for token in output.new_token_ids]
    written: list[int] = []
    memory_end = 0
    remote = Request("remote", tokens, whole.params, remote=True, memory="int8")
    row_bytes = host.engine.remote.memory_bytes["int8"][0]
    refusals: list[Exception] = []
    killed: list[int] = []
    async for output in host.engine.generate(remote):
        written += output.new_token_ids
        if output.memory is not None and output.finish_reason is None:
            assert output.memory.first <= memory_end, "no memory is left out"
            memory_end = output.memory.first + len(output.memory.rows) // row_bytes
        if len(written) > 15 and not killed:
            killed.append(host.engine.replicas[host.engine._streams["remote"].replica].pid)
            os.kill(killed[0], signal.SIGKILL)
        if output.new_token_ids and output.finish_reason is None:
            chain = tuple(expected[len(written) : len(written) + 2])
            tree = OfferedTree(len(tokens) + len(written), chain, tuple(range(len(chain))))
            host.engine.offer_soon("remote", tree, refusals.append)
    assert written == expected and not refusals and killed
    await host.all_ready(3)


async def test_replicas_are_replaced_under_load_and_no_request_fails(host: Hosted) -> None:
    before = set(host.engine.replicas)
    done = await update(host, SETTINGS, {"drafter": "ngram"}, streams=4, max_tokens=64, same=True)
    assert (done.failed, done.different) == (0, 0), done.errors
    assert done.requests > 0 and not before & set(host.engine.replicas)
    assert host.engine.info.drafter == "ngram"


async def test_metrics_tell_of_each_replica(host: Hosted) -> None:
    await ask(host.client, opening(3), 8, 3)
    lines = (await host.client.get("/metrics")).text.splitlines()
    told = [line for line in lines if line.startswith("moaserve_num_requests_running{")]
    assert {name for name in host.engine.replicas if any(f'replica="{name}"' in line for line in told)} == set(host.engine.replicas)
    assert any(line.startswith("moaserve_replicas{") and line.endswith(" 3.0") for line in lines)
