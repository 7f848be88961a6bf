"""EAGLE and independent drafters: what is served is what was trained, alone and in company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.eagle import ARCHITECTURE
from models.errors import CheckpointError
from models.llama import Llama
from models.loader import load_eagle, load_target
from models.moa import tokens_before
from models.plans import prefill_plan
from models.saving import save_eagle
from speculative.drafters.base import VerifiedTokens
from speculative.drafters.eagle import EagleDrafter
from speculative.drafters.growth import Candidates, Frontier, Level, Place, Text
from speculative.drafters.moa import MoADrafter
from speculative.errors import EngineLoadError
from speculative.loading import MOA_WINDOW, moa_windows
from speculative.policy import DraftShape
from tests.speculative.conftest import MOA_KINDS, N0, N1, MakeEngine, random_eagle, random_moa, request, run
from training.forward import DraftForward
from training.masks import cross_attention_mask, self_attention_mask
from training.tasks.eagle import EagleForward

STEPS = 4
PROMPTS = [[5, 9], list(range(3, 20)), [7, 7, 7, 7, 7], list(range(100, 140))]


@pytest.fixture(scope="module")
def target() -> Llama:
    return load_target(N0 / "target", dtype=torch.float32)[0]


@torch.no_grad()
@pytest.mark.parametrize("generation", [2, 3])
@pytest.mark.parametrize("known", [1, 7])
def test_eagle_serves_what_was_trained(target: Llama, generation: int, known: int) -> None:
    """A chain along the true text behind ``known`` verified tokens, told to the drafter in two parts."""
    eagle = random_eagle(generation)
    text = torch.randint(3, 150, (1, known + STEPS + 2))
    wanted = torch.zeros_like(text, dtype=torch.bool)
    wanted[:, known : known + STEPS] = True
    tapped = target.encode(text, taps=eagle.config.taps).tapped
    assert tapped is not None
    trained, _ = EagleForward(eagle)(target, text, tapped, wanted, STEPS)

    cache = target.new_cache(1, 1, 64)
    drafter = EagleDrafter(eagle, target, 1, 64, DraftShape(STEPS, 1, STEPS))
    for start, end in ((0, known // 2), (known // 2, known)):
        plan = prefill_plan(cache, target.config.groups, 0, start, end)
        _, seen = target.forward_tapped(text[0, start:end], plan, cache, drafter.taps)
        slots, previous = torch.zeros_like(plan.positions), tokens_before(text)[0, start:end]
        rows = torch.stack((text[0, start:end], previous, slots, plan.positions))
        drafter.extend(VerifiedTokens(rows, seen), cache)
    lengths, none = torch.tensor([known]), torch.zeros(1, 1, dtype=torch.long)
    inherited = drafter.inherited(lengths)
    for depth in range(STEPS):
        frontier = Frontier(text[:, known + depth : known + depth + 1], torch.zeros(1, 1), none, inherited)
        where = Place(torch.tensor([depth]), torch.tensor([depth]))
        grown = Candidates(torch.zeros(1, 1), none, none)
        told = Text(torch.zeros_like(lengths), lengths, lengths, torch.arange(64), text[:, known - 1])
        level = Level(frontier, grown, told, where, torch.ones(1), None)
        inherited = drafter.grow(level, None, 1, cache)[2].inherited
        # Position known + depth, in the step that is as many guesses deep.
        torch.testing.assert_close(inherited[0, 0, drafter.scratch :], trained[depth][depth], atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["entry", "paired", "ablation"])
@pytest.mark.parametrize(("known", "window"), [(1, None), (7, None), (7, 3)])
def test_moa_serves_what_was_trained(target: Llama, kind: str, known: int, window: int | None) -> None:
    """A chain along the true text behind ``known`` verified tokens."""
    moa = random_moa(**MOA_KINDS[kind])
    start = known - (window or known)
    text = torch.randint(3, 150, (1, known + STEPS + 2))
    wanted = torch.zeros_like(text, dtype=torch.bool)
    wanted[:, known : known + STEPS] = True
    staircase, newest_only = torch.zeros(1, dtype=torch.bool), not moa.config.attends_to_all_memory
    masks = (self_attention_mask(~wanted, staircase), cross_attention_mask(~wanted, newest_only=newest_only))
    for mask in masks:
        mask[..., :start] = False
    trained = DraftForward(moa)(target, text, target.encode(text), *masks, ~wanted, wanted).feature

    cache = target.new_cache(1, 1, 64)
    drafter = MoADrafter(moa, target, 1, 64, DraftShape(STEPS, 1, STEPS), window)
    plan = prefill_plan(cache, target.config.groups, 0, 0, known)
    _, seen = target.forward_tapped(text[0, :known], plan, cache, drafter.taps)
    slots, previous = torch.zeros_like(plan.positions), tokens_before(text)[0, :known]
    rows = torch.stack((text[0, :known], previous, slots, plan.positions))[:, start:]
    drafter.extend(VerifiedTokens(rows, None if seen is None else seen[start:]), cache)
    lengths = torch.tensor([known])
    if moa.config.paired:
        places = tuple(kept.flat_rows(torch.zeros_like(lengths), lengths) for kept in drafter.caches)
        drafter.network.pair(text[0, known : known + 1], lengths, drafter.caches, places)
    where = Text(torch.tensor([start]), lengths, lengths, torch.arange(64), text[:, known - 1])
    for depth in range(STEPS):
        chain = text[:, known : known + depth + 1]
        numbers = torch.arange(depth + 1).unsqueeze(0)
        grown = Candidates(torch.zeros(1, depth + 1), chain, (numbers - 1).clamp(min=0))
        mask = torch.full((1, 1, drafter.scratch), float("-inf"))
        mask[..., : depth + 1] = 0.0
        frontier = Frontier(chain[:, -1:], torch.zeros(1, 1), numbers[:, -1:], mask)
        level = Level(frontier, grown, where, Place(torch.tensor([depth]), torch.tensor([depth])), torch.ones(1), None)
        torch.testing.assert_close(drafter.network.feature(level, drafter.caches)[0], trained[depth], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("drafter", "window"),
    [(name, None) for name in (*MOA_KINDS, "eagle2", "eagle3", "independent")]
    + [(name, 5) for name in ("moa", *MOA_KINDS, "eagle2", "eagle3")],
)
def test_drafts_are_the_same_alone_and_in_company(make_engine: MakeEngine, drafter: str, window: int | None) -> None:
    requests = [request(str(i), prompt, max_tokens=11, temperature=0.0) for i, prompt in enumerate(PROMPTS)]
    together = run(make_engine(drafter=drafter, draft_window=window, prefill_chunk=7, max_num_seqs=4), requests)
    one = make_engine(drafter=drafter, draft_window=window, max_num_seqs=1, prefix_cache_tokens=0)
    for each in requests:
        alone = run(one, [each])[each.request_id]
        assert together[each.request_id][-1].stats.num_accepted_draft_tokens == alone[-1].stats.num_accepted_draft_tokens
        assert together[each.request_id][-1].stats.num_drafts == alone[-1].stats.num_drafts


def test_a_drafter_that_is_the_target_is_always_right(make_engine: MakeEngine) -> None:
    requests = [request(str(i), prompt, max_tokens=25, temperature=0.0) for i, prompt in enumerate(PROMPTS)]
    shape = {"draft_depth": 4, "draft_breadth": 1, "draft_nodes": 4}
    outputs = run(make_engine(drafter=str(N0 / "target"), max_num_seqs=3, **shape), requests)
    for series in outputs.values():
        assert [len(output.new_token_ids) for output in series] == [1, 5, 5, 5, 5, 4]


def test_a_saved_eagle_is_loaded_again(target: Llama, tmp_path: Path) -> None:
    eagle = random_eagle(3)
    eagle.draft_vocabulary = torch.arange(5, 40)
    save_eagle(eagle, tmp_path, dtype=torch.float32)
    loaded = load_eagle(tmp_path, target.config, dtype=torch.float32)
    assert loaded.config == eagle.config and torch.equal(loaded.draft_vocabulary, eagle.draft_vocabulary)
    assert all(torch.equal(tensor, eagle.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    other = load_target(N1 / "target", dtype=torch.float32)[0].config
    config = (tmp_path / "config.json").read_text()
    assert ARCHITECTURE in config
    (tmp_path / "config.json").write_text(config.replace('"hidden_size": 64', '"hidden_size": 96'))
    with pytest.raises(CheckpointError, match="made for a target with hidden_size=96"):
        load_eagle(tmp_path, other, dtype=torch.float32)


def test_a_drafter_of_another_vocabulary_is_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    with pytest.raises(EngineLoadError, match="a drafter must share its target's tokenizer"):
        make_engine(drafter="models/pretrained/concierge")


@pytest.mark.parametrize("drafter", ["none", "ngram", "independent"])
def test_a_window_is_refused_by_drafters_that_have_none(make_engine: MakeEngine, drafter: str) -> None:
    assert make_engine(drafter=drafter, draft_window=0)
    with pytest.raises(EngineLoadError, match="--draft-window 5: only MoA and EAGLE drafters"):
        make_engine(drafter=drafter, draft_window=5)


@pytest.mark.parametrize(("drafter", "unless_told"), [("moa", 64), ("eagle2", None)])
def test_drafters_that_read_memory_have_a_window(make_engine: MakeEngine, drafter: str, unless_told: int | None) -> None:
    for choice, window in ((None, unless_told), (0, None), (9, 9)):
        engine = make_engine(drafter=drafter, draft_window=choice)
        assert engine.drafter is not None and engine.drafter.window == window


@pytest.mark.parametrize("chosen", [None, 0, 9])
def test_on_a_gpu_whole_prompts_are_read_unless_told_otherwise(chosen: int | None) -> None:
    read, sent = moa_windows(chosen, torch.device("cuda"), 128)
    assert (read, sent) == {None: (128, MOA_WINDOW), 0: (None, None), 9: (9, 9)}[chosen]


def test_inner_layers_of_a_compiled_target_cannot_be_read(make_engine: MakeEngine) -> None:
    with pytest.raises(EngineLoadError, match="--compile on: this drafter reads inner layers"):
        make_engine(drafter="eagle3", compile="on")
    assert make_engine(drafter="eagle3", compile="auto").target.compiled is None
