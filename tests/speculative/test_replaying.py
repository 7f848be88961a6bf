"""Engines that replay what they have recorded, with a recorder that needs no GPU: it runs all again, into the same memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import speculative.acceptance as acceptance
import speculative.replaying as replaying_module
from models.plans import recorded_span, span_of
from models.replay import Replayed, padded, rerun, rounded
from speculative.drafters.moa import MoADrafter
from speculative.drafters.tree_drafter import TreeDrafter
from speculative.drafters.wrapper import innermost
from speculative.engine import Engine
from speculative.policy import FixedPolicy
from speculative.replayed_verification import ReplayedVerification
from speculative.replaying import ReplayedMemory, ReplayedTrees, replay_engine
from speculative.request import Request
from speculative.sampler import Sampler
from tests.speculative.conftest import N0, N1, MakeEngine, request, run, tokens

REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "lift_fresh", "unique")
"""Operations that ask a GPU for a number, or bring it one: none can be part of a recording."""


class OnDevice(TorchDispatchMode):
    """Fails on whatever cannot be recorded."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in REFUSED, f"{name} cannot be recorded"
        if name == "index":
            assert all(each is None or each.dtype != torch.bool for each in args[1]), "boolean masks cannot be recorded"
        return func(*args, **(kwargs or {}))


class Pool:
    """A recorder as ``rerun``; for what can be recorded, and outputs are lost when another of its graphs runs."""

    def __init__(self) -> None:
        self._outputs: list[list[Tensor]] = []

    def __call__(self, run: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        run()
        with OnDevice():
            again, outputs = rerun(run)
        self._outputs.append(outputs)

        def replay() -> None:
            for lost in (each for others in self._outputs if others is not outputs for each in others):
                lost.fill_(torch.nan if lost.is_floating_point() else 77)
            again()

        return replay, outputs


class NeverDrafting(FixedPolicy):
    """Plain steps, by a drafter that is to know of them later."""

    def shape(self, batch: Sequence[object], *, reading: bool = False) -> None:
        return None


def crowd() -> list[Request]:
    """Requests that come and go at different times, greedy ones and others, some of which are not to be drafted for."""
    prompts = [[5, 9, 23, 41, 7, 9, 23], [11, 3, 3, 60, 2, 45], [70, 71, 72], [8] * 20, [9, 8, 7, 6, 5]]
    each = [
        {"max_tokens": 24, "temperature": 0.0},
        {"max_tokens": 9, "temperature": 0.8, "seed": 3},
        {"max_tokens": 14, "temperature": 1.0, "seed": 4, "top_p": 0.9, "top_k": 30},
        {"max_tokens": 11, "temperature": 0.0, "speculative": False},
        {"max_tokens": 16, "temperature": 1.0, "seed": 5, "frequency_penalty": 0.4},
    ]
    return [request(str(number), prompt, **params) for number, (prompt, params) in enumerate(zip(prompts, each, strict=True))]


def replaying(engine: Engine) -> Engine:
    replay_engine(engine, Pool)
    return engine


@pytest.mark.parametrize(
    ("drafter", "slots"),
    [
        ("none", 3),
        ("ngram", 3),
        ("moa", 1),
        ("moa", 3),
        ("block", 3),
        ("entry", 3),
        ("entry and block", 3),
        ("paired", 3),
        ("paired block", 3),
        ("vocabulary", 3),
        ("paired block and vocabulary", 3),
        ("ablation", 3),
        ("eagle2 and vocabulary", 3),
        ("eagle3", 3),
        ("independent", 3),
    ],
)
def test_texts_are_the_same_as_without(drafter: str, slots: int, make_engine: MakeEngine) -> None:
    expected = tokens(run(make_engine(N0, "none", max_num_seqs=1), crowd()))
    engine = replaying(make_engine(N0, drafter, max_num_seqs=slots))
    assert tokens(run(engine, crowd())) == expected
    assert recordings(engine) > 0


def test_what_waited_to_be_told_is_what_it_was(make_engine: MakeEngine) -> None:
    """What a recorded pass tapped is overwritten by the next one, and a drafter may be told of it many steps later."""
    engines = [make_engine(N0, "paired block", max_num_seqs=2) for _ in range(2)]
    replaying(engines[1])
    for engine in engines:
        engine.telling.drafting = False
        engine.policy = NeverDrafting(engine.largest_shape)
        engine.add(request("a", [5, 9, 23, 41], max_tokens=12, temperature=0.0))
        for _ in range(9):
            engine.step()
        while not engine.telling.drafting:
            assert engine.telling.catch_up()
    one, other = (engine.drafter.caches for engine in engines if engine.drafter is not None)
    for there, here in zip(one, other, strict=True):
        known = slice(there.flat_row(0, 0), there.flat_row(0, 11))  # the prompt and eight steps
        torch.testing.assert_close(here.data[:, known], there.data[:, known])


def test_trees_whose_shapes_are_recorded_keep_them(make_engine: MakeEngine) -> None:
    """A policy that narrowed them would have one recorded for each size, in the middle of serving."""
    assert innermost(make_engine(N0, "block").drafter).narrows  # type: ignore[union-attr]
    assert not innermost(replaying(make_engine(N0, "block")).drafter).narrows  # type: ignore[union-attr]


@pytest.mark.parametrize("drafter", ["none", "block", "moa"])
def test_texts_are_the_same_where_tokens_are_drawn_together(
    drafter: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(run(make_engine(N0, "none", max_num_seqs=1), crowd()))
    monkeypatch.setattr(acceptance, "by_the_step", lambda device: True)
    asked: list[int] = []
    choose = Sampler._choose
    monkeypatch.setattr(Sampler, "_choose", lambda self, logits: asked.append(1) or choose(self, logits))
    assert tokens(run(replaying(make_engine(N0, drafter, max_num_seqs=3)), crowd())) == expected
    assert len(asked) == 16  # those of the request with a penalty: of the others none was asked for by itself


@pytest.mark.parametrize("policy", ["adaptive", "fixed"])
def test_borrowed_layers_see_what_is_drafted(policy: str, make_engine: MakeEngine) -> None:
    expected = tokens(run(make_engine(N1, "none"), crowd()))
    assert tokens(run(replaying(make_engine(N1, "moa", draft_policy=policy, draft_lookup=4)), crowd())) == expected


@pytest.mark.parametrize("drafter", ["moa", "block", "entry", "eagle3", "independent"])
@pytest.mark.parametrize(("temperature", "least"), [(0.0, 0.05), (0.9, 0.0), (0.9, 0.3)])
def test_trees_are_those_of_drafting_level_by_level(
    drafter: str, temperature: float, least: float, make_engine: MakeEngine
) -> None:
    """Up to what padding a batch changes of the mean by which drafting ends early: here nothing is padded."""
    engines = [make_engine(N0, drafter, draft_min_reach=least, max_num_seqs=2, draft_nodes=6) for _ in range(2)]
    replaying(engines[1])
    for engine in engines:
        for name in "ab":
            engine.add(request(name, [5, 9, 23, 41, ord(name)], max_tokens=16, temperature=temperature, seed=1))
    compared = 0
    while engines[0].has_work:
        if len(engines[0].scheduler.running) == 2:
            (one, other), shape = engines, engines[0].largest_shape
            level, whole = (
                innermost(each.drafter).propose(each.scheduler.batch(), shape, each.cache) for each in (one, other) if each.drafter
            )
            assert level.probabilities is not None and whole.probabilities is not None
            count = level.tokens.shape[1]
            assert torch.equal(level.tokens, whole.tokens[:, :count]) and torch.equal(level.parents, whole.parents[:, :count])
            assert torch.allclose(level.probabilities, whole.probabilities[:, :count])
            assert not whole.probabilities[:, count:].any()
            # Whatever stands behind is a tree with the rest.
            assert (whole.parents <= torch.arange(whole.tokens.shape[1])).all()
            compared += 1
        for engine in engines:
            engine.step()
    assert compared > 3


def recordings(engine: Engine) -> int:
    assert isinstance(engine.tree_pass, ReplayedVerification)
    return len(engine.tree_pass)


def test_what_was_recorded_is_used(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = replaying(make_engine(N0, "moa", max_num_seqs=2))
    drafter = innermost(engine.drafter)
    assert isinstance(drafter, MoADrafter) and isinstance(drafter.trees, ReplayedTrees)
    assert isinstance(drafter.compiled["remember"], ReplayedMemory)
    run(engine, [request("a", [5, 9, 23], max_tokens=20)])
    recorded = recordings(engine)
    monkeypatch.setattr(TreeDrafter, "text", None)  # only level by level is it asked for
    run(engine, [request("b", [6, 9, 23], max_tokens=20)])
    assert recordings(engine) == recorded > 0


def test_long_prompts_are_noted_without_a_recording(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying_module, "MOST_REMEMBERED", 32)
    prompt = [3 + number % 90 for number in range(100)]
    settings = {"draft_window": 0, "prefill_chunk": 60}
    expected = tokens(run(make_engine(N0, "none", **settings), [request("a", prompt, max_tokens=12, seed=1)]))
    assert tokens(run(replaying(make_engine(N0, "moa", **settings)), [request("a", prompt, max_tokens=12, seed=1)])) == expected


def test_texts_up_to_the_last_place(make_engine: MakeEngine) -> None:
    """Missing texts of a batch are taken to end where none ends: they must not write where one stands."""
    asked = [request(str(number), [5 + number, 9, 23], max_tokens=125, seed=number, temperature=0.7) for number in range(3)]
    expected = tokens(run(make_engine(N0, "none", max_num_seqs=4), asked))
    assert tokens(run(replaying(make_engine(N0, "moa", max_num_seqs=4)), asked)) == expected


def test_few_sizes_are_recorded(make_engine: MakeEngine) -> None:
    assert [rounded(count, 6) for count in range(1, 7)] == [1, 2, 4, 4, 6, 6]
    cache, lengths = make_engine(N0, "none", max_model_len=512).cache, range(1, 513)
    spans = {recorded_span(cache, length) for length in lengths}
    assert len(spans) <= 10 and max(spans) == 512
    assert all(length <= recorded_span(cache, length) <= max(span_of(cache, length), 1.25 * length + 1) for length in lengths)


def test_a_recording_reads_what_it_is_given_and_writes_its_own_outputs() -> None:
    made: list[int] = []

    def record(run: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        made.append(1)
        return rerun(run)

    doubled, device = Replayed(record, most=2), torch.device("cpu")

    def double(kind: str, value: float) -> Tensor:
        return doubled(kind, lambda inputs: [inputs[0] * 2], [torch.tensor([value])], device)[0]

    first = double("a", 1.0)
    assert first.item() == 2.0
    assert double("a", 5.0) is first and first.item() == 10.0 and len(made) == 1
    assert double("b", 3.0).item() == 6.0 and first.item() == 10.0
    double("a", 1.0), double("c", 1.0)
    assert len(doubled) == 2 and len(made) == 3
    assert double("a", 4.0).item() == 8.0 and len(made) == 3  # "b" was the one that had not been used for longest
    assert double("b", 4.0).item() == 8.0 and len(made) == 4


def test_padding_repeats_the_last() -> None:
    numbers = torch.tensor([[1, 2], [3, 4]])
    assert padded(numbers, 2) is numbers
    assert padded(numbers, 4).tolist() == [[1, 2], [3, 4], [3, 4], [3, 4]]
