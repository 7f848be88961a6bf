"""What is kept of verified trees, and what a drafter is told of them, by lists and by tensors as on a GPU."""

from __future__ import annotations

import pytest
import torch

import speculative.acceptance as acceptance
from models.kv_cache import KVCache
from speculative.acceptance import keep_paths
from speculative.request import Request, SamplingParams
from speculative.sequence import Sequence
from speculative.texts import Texts
from speculative.tree import DraftTree
from speculative.verification import Acceptance

SCRATCH, LENGTH = 4, 12


def sequence(slot: int, tokens: list[int], *, speculative: bool) -> Sequence:
    params = SamplingParams(50, temperature=0.0, speculative=speculative)
    made = Texts(None, 100, frozenset()).begin(Request(str(slot), tuple(tokens), params), LENGTH)
    made.slot, made.num_computed = slot, len(tokens) - 1
    return made


def batch(*speculative: bool) -> list[Sequence]:
    texts = ([7, 8, 9], [5], [1, 2, 3, 4])
    return [sequence(slot, tokens, speculative=each) for slot, (tokens, each) in enumerate(zip(texts, speculative, strict=True))]


@pytest.fixture
def cache() -> KVCache:
    made = KVCache(2, 3, SCRATCH, LENGTH, 1, 1, dtype=torch.float32)
    made.data.copy_(torch.arange(made.data.numel()).view(made.data.shape))
    return made


@pytest.fixture(params=["lists", "tensors"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "by_the_step", lambda device: request.param == "tensors")


TREES = DraftTree([[20, 21, 22], [23, 24, 25], [26, 27, 28]], [[0, 0, 1], [0, 1, 2], [0, 0, 0]], (3, 3, 3))
ACCEPTED = [Acceptance((1, 3), (20, 22, 30)), Acceptance((), (31,)), Acceptance((2,), (27, 32))]
TAPPED = torch.arange(12.0).unsqueeze(1)


def test_accepted_rows_move_whoever_is_told(cache: KVCache) -> None:
    before = cache.data.clone()
    keep_paths(cache, batch(True, False, True), TREES, ACCEPTED, TAPPED)
    slot = SCRATCH + LENGTH
    moved = {SCRATCH + 2: 0, SCRATCH + 3: 1, SCRATCH + 4: 3, slot + SCRATCH: slot, 2 * slot + SCRATCH + 3: 2 * slot}
    moved[2 * slot + SCRATCH + 4] = 2 * slot + 2
    for row in range(cache.data.shape[1]):
        assert torch.equal(cache.data[:, row], before[:, moved.get(row, row)]), row


def test_the_drafter_is_told_of_those_that_speculate(cache: KVCache) -> None:
    told = keep_paths(cache, batch(True, False, True), TREES, ACCEPTED, TAPPED)
    assert told is not None and len(told) == 5
    assert told.token_ids.tolist() == [9, 20, 22, 4, 27] and told.rows[1].tolist() == [8, 9, 20, 3, 4]
    assert told.slots.tolist() == [0, 0, 0, 2, 2] and told.positions.tolist() == [2, 3, 4, 3, 4]
    assert told.tapped is not None and told.tapped.flatten().tolist() == [0, 1, 3, 8, 10]


def test_nobody_is_told_where_none_speculates(cache: KVCache) -> None:
    before = cache.data.clone()
    assert keep_paths(cache, batch(False, False, False), TREES, ACCEPTED, None) is None
    assert not torch.equal(cache.data, before)


def test_roots_alone_stay_where_they_are(cache: KVCache) -> None:
    before, roots = cache.data.clone(), [Acceptance((), (30,))] * 3
    told = keep_paths(cache, batch(False, True, False), DraftTree.empty(3), roots, TAPPED[:3])
    assert told is not None and told.rows.tolist() == [[5], [0], [1], [0]]
    assert told.tapped is not None and told.tapped.tolist() == [[1.0]]
    assert keep_paths(cache, batch(False, False, False), DraftTree.empty(3), roots, None) is None
    assert torch.equal(cache.data, before)


def test_a_chain_that_stands_in_its_place_stays_there(cache: KVCache) -> None:
    before = cache.data.clone()
    accepted = [Acceptance((1, 2, 3), (20, 21, 22, 30)), *ACCEPTED[1:]]
    chains = DraftTree.from_chains([[20, 21, 22], [23, 24, 25], [26, 27, 28]]).straightened([True, False, False])
    told = keep_paths(cache, batch(True, True, True), chains, accepted, None)
    assert told is not None and told.tapped is None and len(told) == 7
    assert torch.equal(cache.data[:, : SCRATCH + LENGTH], before[:, : SCRATCH + LENGTH])
    assert torch.equal(cache.data[:, SCRATCH + LENGTH + SCRATCH], before[:, SCRATCH + LENGTH])
