"""Other drafters on an edge draft what they would beside the target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.network.others import EagleOnEdge, ModelOnEdge
from models.llama import Llama
from models.loader import load_target
from speculative.detokenizer import Detokenizer
from speculative.drafters.base import VerifiedTokens
from speculative.drafters.eagle import EagleDrafter
from speculative.drafters.independent import IndependentDrafter
from speculative.drafters.moa_edge import ReceivedMemory
from speculative.policy import DraftShape
from speculative.request import Request, SamplingParams
from speculative.sampler import Sampler
from speculative.sequence import Sequence
from speculative.tree import DraftTree
from tests.speculative.conftest import N0, random_eagle

SHAPE = DraftShape(3, 2, 6, 0.0)
TEXT = [5, 9, 12, 7, 30, 8, 41]


@pytest.fixture(scope="module")
def target() -> Llama:
    return load_target(N0 / "target", dtype=torch.float32)[0]


def sequence(tokens: list[int]) -> Sequence:
    params = SamplingParams(temperature=0.0)
    sampler = Sampler(params, 0, tokens[:3], ())
    asked = Request("text", tuple(tokens[:3]), params)
    return Sequence(asked, sampler, 64, Detokenizer(None), list(tokens), slot=0, num_computed=len(tokens) - 1)


def verified(tokens: list[int], first: int, tapped: Tensor | None = None) -> VerifiedTokens:
    positions = torch.arange(first, len(tokens) - 1)
    previous = torch.tensor([0, *tokens][first : len(tokens) - 1])
    rows = torch.stack((torch.tensor(tokens[first:-1]), previous, torch.zeros_like(positions), positions))
    return VerifiedTokens(rows, tapped)


def drafted(drafter: Any, tokens: list[int]) -> tuple[list[int], list[int]]:
    tree: DraftTree = drafter.propose([sequence(tokens)], SHAPE, None)
    assert tree.sizes == (SHAPE.nodes,)
    return tree.tokens[0].tolist(), tree.parents[0].tolist()


@torch.inference_mode()
@pytest.mark.parametrize("generation", [2, 3])
def test_eagle_drafts_the_same_from_what_the_server_tells(target: Llama, generation: int) -> None:
    eagle = random_eagle(generation)
    tapped = target.encode(torch.tensor([TEXT]), taps=eagle.config.taps).tapped
    assert tapped is not None
    tapped = tapped.flatten(0, -2)
    here, there = (EagleDrafter(eagle, target, 1, 64, SHAPE) for _ in range(2))
    on_edge = EagleOnEdge(there)
    for first, tokens in ((0, TEXT[:4]), (3, TEXT)):
        told, end = verified(tokens, first, tapped[first : len(tokens) - 1]), len(tokens) - 1
        here.extend(told, here.cache)
        on_edge.extend(ReceivedMemory(told.slots, told.positions, told.token_ids, here.memory(0, first, end)[0]))
        assert drafted(on_edge, tokens) == drafted(here, tokens)


@torch.inference_mode()
def test_a_model_of_its_own_reads_the_text_by_itself_also_one_that_has_changed(target: Llama) -> None:
    on_edge = ModelOnEdge(IndependentDrafter(target, 1, 64, SHAPE))
    for tokens in (TEXT[:4], TEXT, [*TEXT[:5], 3, 4, 6, 10], [20, 21]):
        alone = IndependentDrafter(target, 1, 64, SHAPE)
        alone.extend(verified(tokens, 0), alone.cache)
        assert drafted(on_edge, tokens) == drafted(alone, tokens)


@torch.inference_mode()
@pytest.mark.parametrize("generation", [2, 3])
def test_eagle_with_a_window_drafts_as_if_the_text_began_there(target: Llama, generation: int) -> None:
    eagle, first = random_eagle(generation), 3
    tapped = target.encode(torch.tensor([TEXT]), taps=eagle.config.taps).tapped
    assert tapped is not None
    told = verified(TEXT, first, tapped.flatten(0, -2)[first : len(TEXT) - 1])
    here, there = (EagleDrafter(eagle, target, 1, 64, SHAPE, window) for window in (4, None))
    here.extend(VerifiedTokens(told.rows, told.tapped, begin=first), here.cache)
    on_edge = EagleOnEdge(there)
    received = ReceivedMemory(told.slots, told.positions, told.token_ids, here.memory(0, first, len(TEXT) - 1)[0])
    texts = [replace(sequence(TEXT), drafter_start=first) for _ in range(2)]
    # Another text's features stood there before.
    there.features.data.fill_(7.0)
    for drafter, text in zip((here, on_edge), texts, strict=True):
        if drafter is on_edge:
            on_edge.extend(received)
        tree: DraftTree = drafter.propose([text], SHAPE, None)
        assert tree.sizes == (SHAPE.nodes,)
        if drafter is here:
            expected = tree
    assert torch.equal(tree.tokens, expected.tokens) and torch.equal(tree.parents, expected.parents)
