"""Drafting in blocks: what is served is what was trained, and what is saved is what is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from models.config import MoAConfig
from models.errors import CheckpointError
from models.llama import Llama
from models.loader import load_drafter, load_target
from models.moa import MoA, tokens_before
from models.plans import prefill_plan
from models.saving import save_drafter
from speculative.drafters.base import VerifiedTokens
from speculative.drafters.growth import Candidates, Frontier, Level, Place, Text
from speculative.drafters.moa import MoADrafter
from speculative.errors import EngineLoadError
from speculative.policy import DraftShape
from tests.speculative.conftest import N0, MakeEngine, random_moa
from training.forward import DraftForward
from training.masks import cross_attention_mask, self_attention_mask

SIZE = 5


@pytest.fixture(scope="module")
def target() -> Llama:
    return load_target(N0 / "target", dtype=torch.float32)[0]


@pytest.fixture(params=[{}, {"has_entry": True}, {"has_entry": True, "paired": True}], ids=["", "entry", "paired"])
def moa(request: pytest.FixtureRequest) -> MoA:
    return random_moa(draft_block_size=SIZE, **request.param)


@torch.no_grad()
@pytest.mark.parametrize("known", [1, 7])
def test_serving_computes_what_was_trained(target: Llama, moa: MoA, known: int) -> None:
    """A block behind ``known`` verified tokens, along the true text."""
    text = torch.randint(3, 150, (1, known + SIZE + 3))
    drafted = torch.zeros_like(text, dtype=torch.bool)
    drafted[:, known : known + SIZE] = True
    boundaries = ~drafted
    staircase = torch.zeros(1, dtype=torch.bool)
    truth = target.encode(text)
    masks = (self_attention_mask(boundaries, staircase), cross_attention_mask(boundaries))
    trained = DraftForward(moa)(target, text, truth, *masks, boundaries, drafted).feature

    cache = target.new_cache(1, 1, 64)
    drafter = MoADrafter(moa, target, 1, 64, DraftShape(SIZE, 2, 8))
    plan = prefill_plan(cache, target.config.groups, 0, 0, known)
    _, seen = target.forward_tapped(text[0, :known], plan, cache, drafter.taps)
    slots, previous = torch.zeros_like(plan.positions), tokens_before(text)[0, :known]
    drafter.extend(VerifiedTokens(torch.stack((text[0, :known], previous, slots, plan.positions)), seen), cache)
    if moa.config.paired:
        places = tuple(kept.flat_rows(torch.tensor([0]), torch.tensor([known])) for kept in drafter.caches)
        drafter.network.pair(text[0, known : known + 1], torch.tensor([known]), drafter.caches, places)
    network, lengths = drafter.network, torch.tensor([known])
    where = Text(torch.tensor([0]), lengths, lengths, torch.arange(64), text[:, known - 1])
    features = network.block(text[:, known : known + 1], where, drafter.caches)
    nothing = torch.zeros(1, 1)
    states = torch.zeros(1, 1, target.config.hidden_size)
    served = []
    chain = text[:, known:]
    for depth in range(len(trained)):
        # A chain: each token follows the one before it, whose number is its own less one.
        frontier = Frontier(chain[:, depth : depth + 1], nothing, torch.tensor([[depth]]), states)
        grown = Candidates(nothing, chain[:, : depth + 1], (torch.arange(depth + 1) - 1).clamp(min=0).unsqueeze(0))
        place = Place(torch.tensor([depth]), torch.tensor([0]))
        states = network.states(Level(frontier, grown, where, place, torch.ones(1), None), features, drafter.caches)
        served.append(states[0, 0])
    torch.testing.assert_close(torch.stack(served), trained, atol=1e-5, rtol=1e-5)


def test_blocks_of_different_lengths_share_a_batch(target: Llama, moa: MoA) -> None:
    """Each sequence of a batch gets what it gets alone, cut blocks and padding included."""
    torch.manual_seed(1)
    text = torch.randint(3, 150, (3, 20))
    response = torch.zeros(3, 20, dtype=torch.bool)
    for row, (start, end) in enumerate([(4, 20), (9, 14), (1, 3)]):
        response[row, start:end] = True
    boundaries = ~response
    boundaries[0, 9] = boundaries[0, 15] = True
    wanted = ~boundaries

    def states(rows: slice) -> torch.Tensor:
        batch, known = text[rows], boundaries[rows]
        masks = (self_attention_mask(known, torch.zeros(len(batch), dtype=torch.bool)), cross_attention_mask(known))
        out: torch.Tensor = DraftForward(moa)(target, batch, target.encode(batch), *masks, known, wanted[rows]).feature
        return out

    together = states(slice(None))
    torch.testing.assert_close(together, torch.cat([states(slice(row, row + 1)) for row in range(3)]))


def test_a_saved_block_is_loaded_again(target: Llama, moa: MoA, tmp_path: Path) -> None:
    save_drafter(moa, tmp_path, dtype=torch.float32)
    loaded = load_drafter(tmp_path, target.config, dtype=torch.float32)
    assert loaded.config == moa.config
    assert loaded.state_dict().keys() == moa.state_dict().keys()
    assert all(torch.equal(tensor, moa.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_trees_are_no_deeper_than_the_block(make_engine: MakeEngine) -> None:
    with pytest.raises(EngineLoadError, match="trees of 8 levels: lower --draft-depth \\(9\\)"):
        make_engine(drafter="block", draft_depth=9, draft_nodes=9)


def test_blocks_do_not_borrow_layers(target: Llama) -> None:
    with pytest.raises(CheckpointError, match="borrowed layers"):
        MoAConfig.from_target(target.config, draft_block_size=4, target_layer_inference=1)
    with pytest.raises(CheckpointError, match="at least 2 positions"):
        dataclasses.replace(MoAConfig.from_target(target.config), draft_block_size=1)
