"""Requests whose draft trees come from outside: the same tokens whatever comes and whenever, and nothing without."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from speculative import loading
from speculative.config import MemoryFormat
from speculative.drafters.moa import MoADrafter
from speculative.drafters.wrapper import innermost
from speculative.engine import Engine
from speculative.errors import InvalidRequestError
from speculative.remote.memory_codec import MemoryCodec
from speculative.request import OfferedTree, Request, RequestOutput
from tests.speculative.conftest import N0, N1, MakeEngine, request, run, tokens
from tests.speculative.test_engine import mixed_requests


def remote(each: Request) -> Request:
    return replace(each, remote=True)


def offered(chance: random.Random, length: int, following: list[int]) -> OfferedTree:
    """A tree that holds some of what follows, at a random place among random tokens; sometimes a chain, sometimes nothing."""
    nodes, parents, right = [], [], 0
    for node in range(chance.choice([0, 1, 3, 8, 16])):
        depth = sum(1 for _ in _above(parents, right)) if right else 0
        if chance.random() < 0.6 and depth < len(following):
            parents.append(right)
            nodes.append(following[depth])
            right = node + 1
        else:
            parents.append(chance.randint(0, node))
            nodes.append(chance.randrange(160))
    return OfferedTree(length, tuple(nodes), tuple(parents))


def _above(parents: list[int], row: int):
    while row:
        yield row
        row = parents[row - 1]


def drive(
    engine: Engine,
    requests: list[Request],
    expected: dict[str, list[int]],
    chance: random.Random,
    look: Callable[[RequestOutput], None] = lambda output: None,
) -> dict[str, list[int]]:
    """Run requests, offering trees at random times to those that are remote, with a ``look`` at what does not end one."""
    outputs: dict[str, list[RequestOutput]] = {each.request_id: [] for each in requests}
    for each in requests:
        engine.add(each)
    left = {each.request_id: each for each in requests}
    while left:
        for name, each in left.items():
            said = tokens(outputs)[name]
            if each.remote and said and chance.random() < 0.5:
                engine.offer(name, offered(chance, len(each.prompt_token_ids) + len(said), expected[name][len(said) :]))
        if engine.has_work:
            for output in engine.step():
                outputs[output.request_id].append(output)
                if output.finish_reason is not None:
                    del left[output.request_id]
                else:
                    look(output)
            engine.scheduler.check_integrity()
    return tokens(outputs)


@pytest.fixture(scope="module")
def expected(make_engine: MakeEngine) -> dict[str, list[int]]:
    """What is written plainly, one text after the other."""
    engine = make_engine(N0, "none", prefix_cache_tokens=0)
    return {name: ids for each in mixed_requests() for name, ids in tokens(run(engine, [each])).items()}


@pytest.mark.parametrize("drafter", ["none", "moa", "entry and block", "eagle3"])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_the_same_whatever_comes_and_beside_whomever(
    make_engine: MakeEngine, expected: dict[str, list[int]], drafter: str, seed: int
) -> None:
    requests = mixed_requests()
    for share in (1.0, 0.5):
        chance = random.Random(seed)
        engine = make_engine(N0, drafter, max_num_seqs=4, prefill_chunk=16, prefix_cache_tokens=0)
        mixed = [remote(each) if chance.random() < share else each for each in requests]
        assert drive(engine, mixed, expected, chance) == expected


def test_what_is_foretold_rightly_is_accepted_however_long(make_engine: MakeEngine) -> None:
    one = request("a", [5, 9, 2], max_tokens=90, temperature=0.8, seed=3)
    (expected,) = tokens(run(make_engine(N0, "none"), [one])).values()
    engine = make_engine(N0, "none")
    engine.add(remote(one))
    (first,) = engine.step()
    chain = expected[1:61]
    engine.offer("a", OfferedTree(4, tuple(chain), tuple(range(60))))
    (second,) = engine.step()
    assert [*first.new_token_ids, *second.new_token_ids] == expected[:62]
    assert second.num_accepted == 60


def test_without_a_tree_nothing_goes_on(make_engine: MakeEngine) -> None:
    engine = make_engine(N0, "moa", max_num_seqs=1)
    for name in ("a", "b"):
        engine.add(remote(request(name, [5, 9, 2], max_tokens=9, temperature=0.0)))
    assert [output.request_id for output in engine.step()] == ["a"]
    assert not engine.has_work and not engine.step()
    assert engine.abort("a") is not None
    assert engine.has_work
    assert [output.request_id for output in engine.step()] == ["b"]


def test_others_go_on_beside_one_that_waits(make_engine: MakeEngine) -> None:
    waits, goes = request("a", [5, 9, 2], max_tokens=9, temperature=0.0), request("b", [7, 7], max_tokens=9, temperature=0.0)
    engine = make_engine(N0, "moa")
    engine.add(remote(waits))
    engine.add(goes)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [output.request_id for output in outputs].count("a") == 1
    assert outputs[-1].request_id == "b" and outputs[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (OfferedTree(3), "4 tokens, not 3"),
        (OfferedTree(5), "4 tokens, not 5"),
        (OfferedTree(4, (1, 2), (0,)), "2 tokens have 1 parents"),
        (OfferedTree(4, (160,), (0,)), "outside the vocabulary"),
        (OfferedTree(4, (-1,), (0,)), "outside the vocabulary"),
        (OfferedTree(4, (1, 2), (0, 2)), "parent must stand before"),
        (OfferedTree(4, (1, 2), (0, -1)), "parent must stand before"),
        (OfferedTree(4, (1,) * 40, (0,) * 40), "40 nodes; send at most"),
        (OfferedTree(4, (1,) * 40, tuple(range(40))), "40 nodes; send at most"),
    ],
)
def test_trees_that_cannot_be_verified_are_refused(make_engine: MakeEngine, tree: OfferedTree, message: str) -> None:
    engine = make_engine(N0, "moa")
    engine.add(remote(request("a", [5, 9, 2], max_tokens=30, temperature=0.0)))
    engine.step()
    with pytest.raises(InvalidRequestError, match=message):
        engine.offer("a", tree)
    assert not engine.has_work


def test_only_remote_requests_that_have_begun_take_trees(make_engine: MakeEngine) -> None:
    engine = make_engine(N0, "moa")
    engine.add(request("here", [5, 9, 2], max_tokens=30, temperature=0.0))
    engine.add(remote(request("elsewhere", [5, 9, 2], max_tokens=30, temperature=0.0)))
    for name, message in (("here", "takes no trees"), ("nobody", "no request 'nobody'"), ("elsewhere", "still being read")):
        with pytest.raises(InvalidRequestError, match=message):
            engine.offer(name, OfferedTree(3))


@pytest.mark.parametrize("drafter", ["moa", "block", "entry and block", "paired", "paired block", "ablation"])
@pytest.mark.parametrize("memory", ["bfloat16", "int8"])
@pytest.mark.parametrize(("window", "sent"), [(0, 0), (4, 4), (128, 4)])
def test_memory_comes_once_and_as_the_drafter_has_it(
    make_engine: MakeEngine,
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    drafter: str,
    memory: MemoryFormat,
    window: int,
    sent: int,
) -> None:
    monkeypatch.setattr(loading, "moa_windows", lambda *_: (window or None, sent or None))  # as on a GPU, where the two differ
    requests = [replace(remote(each), memory=memory) for each in mixed_requests()]
    engine = make_engine(N0, drafter, max_num_seqs=3, prefill_chunk=7, prefix_cache_tokens=0)
    kept = innermost(engine.drafter)
    assert isinstance(kept, MoADrafter)
    codec, chance = MemoryCodec.of(kept.config, memory), random.Random(0)
    begin = {each.request_id: max(0, len(each.prompt_token_ids) - (sent or 1000)) for each in requests}

    def look(output: RequestOutput) -> None:
        if output.memory is None:
            return
        name = output.request_id
        sequence = engine.scheduler.find(name)
        assert sequence is not None and output.memory.first == begin[name]
        kept.pair_newest([sequence])  # its slot may have changed since
        rows, newest = kept.memory(sequence.slot, begin[name], sequence.num_computed)
        assert torch.equal(codec.rows.decode(output.memory.rows), codec.rows.decode(codec.rows.encode(rows)))
        begin[name] = sequence.num_computed
        assert (newest is None) == (output.memory.newest == b"")
        if newest is not None and codec.newest is not None:
            wanted = codec.newest.encode(newest)
            if not kept.config.paired:
                assert output.memory.newest == wanted
                return
            # What was paired again alone, just now, may round another way than in company: by a step of int8, the coarsest format.
            sent, step = codec.newest.decode(output.memory.newest), float(newest.abs().max()) / 127
            torch.testing.assert_close(sent, codec.newest.decode(wanted), atol=step, rtol=0)

    assert drive(engine, requests, expected, chance, look) == expected
    assert all(begin[each.request_id] >= len(each.prompt_token_ids) for each in requests)


def test_a_next_turn_has_what_is_cached_sent_too(make_engine: MakeEngine) -> None:
    engine = make_engine(N0, "entry", draft_window=0)
    text = list(range(3, 60))
    run(engine, [request("a", text, max_tokens=4, temperature=0.0)])
    for name, known in (("b", 0), ("c", 20)):
        engine.add(replace(remote(request(name, [*text, 9], max_tokens=4, temperature=0.0)), memory="int8", memory_from=known))
        (output,) = engine.step()
        assert output.stats.cached_tokens == 48
        assert output.memory is not None and output.memory.first == known
        assert len(output.memory.rows) == (58 - known) * MemoryCodec.of(innermost(engine.drafter).config, "int8").bytes_per_token
        engine.abort(name)


def test_memory_is_refused_where_there_is_none(make_engine: MakeEngine) -> None:
    one = replace(remote(request("a", [1, 2], max_tokens=4)), memory="int8")
    for engine in (make_engine(N0, "ngram"), make_engine(N1, "moa")):
        with pytest.raises(InvalidRequestError, match="needs a MoA drafter of N = 0"):
            engine.add(one)
    engine = make_engine(N0, "none")  # whoever drafts for it needs the tokens alone
    engine.add(one)
    assert [output.memory for output in engine.step()] == [None]
    with pytest.raises(InvalidRequestError, match="for remote requests"):
        make_engine(N0, "moa").add(replace(one, remote=False))
