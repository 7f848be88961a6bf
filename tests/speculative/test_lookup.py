"""When texts are looked up, when the other drafter is asked, and what a batch of both looks like."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from models.kv_cache import KVCache
from speculative.detokenizer import Detokenizer
from speculative.drafters.base import VerifiedTokens
from speculative.drafters.lookup import LookupDrafter
from speculative.policy import DraftShape
from speculative.request import Request, SamplingParams
from speculative.sampler import Sampler
from speculative.sequence import Sequence
from speculative.tree import DraftTree

SHAPE = DraftShape(depth=3, breadth=2, nodes=4)
CACHE = KVCache(1, 1, 0, 1, 1, 2, dtype=torch.float32)


class Other:
    """Drafts the tree 90 → (91, 92) for everyone, and counts how often."""

    name = "other"
    taps: tuple[int, ...] = ()
    window: int | None = None
    caches: tuple[KVCache, ...] = ()

    def __init__(self) -> None:
        self.asked = 0

    def extend(self, verified: VerifiedTokens, target_cache: KVCache) -> None: ...

    def forget(self, sequence: Sequence) -> None: ...

    def target_scratch_rows(self, shape: DraftShape) -> int:
        return 7

    def propose(self, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache) -> DraftTree:
        self.asked += 1
        batch = len(sequences)
        sizes = tuple(3 if sequence.speculative else 0 for sequence in sequences)
        return DraftTree(torch.tensor([[90, 91, 92]] * batch), torch.tensor([[0, 1, 1]] * batch), sizes)


def sequence(name: str, text: list[int], *, speculative: bool = True) -> Sequence:
    request = Request(name, tuple(text), SamplingParams(10, speculative=speculative))
    return Sequence(request, Sampler(request.params, 0, text, ()), 1000, Detokenizer(None, ()), list(text))


@pytest.fixture
def other() -> Other:
    return Other()


@pytest.fixture
def drafter(other: Other) -> LookupDrafter:
    return LookupDrafter(other, order=3)


def test_a_repeated_text_is_continued_without_asking(drafter: LookupDrafter, other: Other) -> None:
    tree = drafter.propose([sequence("a", [1, 2, 3, 4, 5, 6, 7, 1, 2, 3])], SHAPE, CACHE)
    assert tree.tokens.tolist() == [[4, 5, 6, 7]]
    assert tree.parents.tolist() == [[0, 1, 2, 3]]
    assert tree.sizes == (4,)
    assert other.asked == 0


def test_without_a_match_the_other_drafts(drafter: LookupDrafter, other: Other) -> None:
    tree = drafter.propose([sequence("a", [1, 2, 3, 4, 5, 2, 3])], SHAPE, CACHE)
    assert tree.tokens.tolist() == [[90, 91, 92]]
    assert other.asked == 1


def test_a_batch_of_both_has_chains_and_trees(drafter: LookupDrafter) -> None:
    batch = [
        sequence("a", [1, 2, 3, 4]),
        sequence("b", [1, 2, 3, 4, 5, 6, 1, 2, 3]),
        sequence("c", [1, 2, 3, 4, 1, 2, 3], speculative=False),
    ]
    tree = drafter.propose(batch, SHAPE, CACHE)
    assert tree.tokens[0].tolist() == [90, 91, 92, 0] and tree.parents[0].tolist() == [0, 1, 1, 0]
    assert tree.tokens[1].tolist() == [4, 5, 6, 1] and tree.parents[1].tolist() == [0, 1, 2, 3]
    assert tree.sizes == (3, 4, 0)


def test_nobody_who_speculates_asks_for_nothing(drafter: LookupDrafter, other: Other) -> None:
    assert drafter.propose([sequence("a", [1, 2, 3], speculative=False)], SHAPE, CACHE).num_rows == 1
    assert other.asked == 0


def steps(drafter: LookupDrafter, other: Other, text: Sequence) -> Callable[[list[int]], bool]:
    """What lets the text grow, and tells whether the next draft comes from it."""

    def step(tokens: list[int]) -> bool:
        text.tokens.extend(tokens)
        asked = other.asked
        drafter.propose([text], SHAPE, CACHE)
        return other.asked == asked

    return step


def test_matches_that_do_not_hold_are_given_up_until_they_hold_again(drafter: LookupDrafter, other: Other) -> None:
    step = steps(drafter, other, sequence("a", [1, 2, 3, 4, 5, 6, 7, 8]))
    # The same three tokens are followed by something new each time.
    used = [step([1, 2, 3]), *(step([100 + i, 1, 2, 3]) for i in range(20))]
    assert used[:10] == [True] * 10 and not used[-1]
    # Unused, matches of three tokens foretell four at a time again.
    for start in range(200, 1000, 20):
        step([start, start + 1, start + 2, *range(start + 3, start + 9), 9])
        used.append(step([start, start + 1, start + 2]))
        step([*range(start + 3, start + 9)])
    assert used[-1]


def test_matches_are_judged_by_their_length(drafter: LookupDrafter, other: Other) -> None:
    step = steps(drafter, other, sequence("a", [*range(10, 30), 1, 2, 3, 4]))
    assert [step([100 + i, 1, 2, 3]) for i in range(20)][-1] is False
    assert step(list(range(10, 18))), "eight tokens have not disappointed anyone"


def test_what_one_request_taught_the_next_one_knows(drafter: LookupDrafter, other: Other) -> None:
    first = steps(drafter, other, sequence("a", [1, 2, 3, 4]))
    assert [first([100 + i, 1, 2, 3]) for i in range(20)][-1] is False
    assert steps(drafter, other, sequence("b", [5, 6, 7, 8]))([5, 6, 7]) is False


def test_scratch_rows_are_the_others(drafter: LookupDrafter) -> None:
    assert drafter.target_scratch_rows(SHAPE) == 7
