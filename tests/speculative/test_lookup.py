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
QUOTE = list(range(1, 13))
"""Long enough to be believed in at first."""
CACHE = KVCache(1, 1, 0, 1, 1, 2, dtype=torch.float32)


class Other:
    """Drafts the tree 90 → (91, 92) for everyone, and counts how often."""

    name = "other"
    taps: tuple[int, ...] = ()
    window: int | None = None
    caches: tuple[KVCache, ...] = ()

    def __init__(self) -> None:
        self.asked = 0
        self.probabilities: torch.Tensor | None = None

    def extend(self, verified: VerifiedTokens, target_cache: KVCache) -> None: ...

    def forget(self, sequence: Sequence) -> None: ...

    def target_scratch_rows(self, shape: DraftShape) -> int:
        return 7

    def propose(self, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache) -> DraftTree:
        self.asked += 1
        batch = len(sequences)
        sizes = tuple(3 if sequence.speculative else 0 for sequence in sequences)
        known = None if self.probabilities is None else self.probabilities.repeat(batch, 1)
        return DraftTree(torch.tensor([[90, 91, 92]] * batch), torch.tensor([[0, 1, 1]] * batch), sizes, (), known)


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
    tree = drafter.propose([sequence("a", [*QUOTE, 13, 14, 15, 16, 17, *QUOTE])], SHAPE, CACHE)
    assert tree.tokens.tolist() == [[13, 14, 15, 16]]
    assert tree.parents.tolist() == [[0, 1, 2, 3]]
    assert tree.sizes == (4,)
    assert other.asked == 0


def test_without_a_match_the_other_drafts(drafter: LookupDrafter, other: Other) -> None:
    tree = drafter.propose([sequence("a", [*QUOTE, 13, *QUOTE[-2:]])], SHAPE, CACHE)
    assert tree.tokens.tolist() == [[90, 91, 92]]
    assert other.asked == 1


def test_a_batch_of_both_has_chains_and_trees(drafter: LookupDrafter) -> None:
    batch = [
        sequence("a", QUOTE),
        sequence("b", [*QUOTE, 13, 14, 15, *QUOTE]),
        sequence("c", [*QUOTE, 13, *QUOTE], speculative=False),
    ]
    tree = drafter.propose(batch, SHAPE, CACHE)
    assert tree.tokens[0].tolist() == [90, 91, 92, 0] and tree.parents[0].tolist() == [0, 1, 1, 0]
    assert tree.tokens[1].tolist() == [13, 14, 15, 1] and tree.parents[1].tolist() == [0, 1, 2, 3]
    assert tree.sizes == (3, 4, 0)


def test_quotes_say_how_likely_they_are(drafter: LookupDrafter, other: Other) -> None:
    """So that a policy weighs them against other texts' trees instead of taking them for certain."""
    quoting = sequence("a", [*QUOTE, 13, 14, 15, 16, 17, *QUOTE])
    alone = drafter.propose([quoting], SHAPE, CACHE).probabilities
    assert alone is not None
    assert 0.5 < alone[0, 0] < 1 and alone[0].tolist() == sorted(alone[0].tolist(), reverse=True)
    other.probabilities = torch.tensor([[0.9, 0.5, 0.2]])
    mixed = drafter.propose([sequence("b", QUOTE), sequence("c", quoting.tokens)], SHAPE, CACHE).probabilities
    assert mixed is not None
    assert mixed[0].tolist() == pytest.approx([0.9, 0.5, 0.2, 0.0])
    assert mixed[1].tolist() == pytest.approx(sorted([0.9, 0.5, *alone[0].tolist()], reverse=True)[:4])


def test_a_match_that_does_not_suffice_is_merged_with_the_tree(drafter: LookupDrafter, other: Other) -> None:
    other.probabilities = torch.tensor([[0.9, 0.5, 0.1]])
    tree = drafter.propose([sequence("a", [1, 2, 3, 90, 5, 6, 1, 2, 3])], SHAPE, CACHE)
    assert other.asked == 1
    assert tree.probabilities is not None
    assert tree.tokens.tolist() == [[90, 91, 5, 92]] and tree.parents.tolist() == [[0, 1, 1, 1]]
    assert tree.probabilities[0].tolist() == pytest.approx([0.9, 0.5, 3 / 7 * 3 / 7, 0.1])


def test_matches_are_as_likely_as_those_before_them_held(drafter: LookupDrafter, other: Other) -> None:
    """Half of them get nothing right and the others all: what follows a token that was right is likelier than that one."""
    other.probabilities = torch.tensor([[0.01, 0.005, 0.002]])
    text = sequence("a", [0, *QUOTE[:6], 20, 21, 22, 23])
    for new in range(1000, 2000, 2):
        text.tokens.extend((new, *QUOTE[:6]))
        probabilities = drafter.propose([text], SHAPE, CACHE).probabilities
        text.tokens.extend([new + 1] if new % 4 else [20, 21, 22, 23])
        text.tokens.extend((*QUOTE[:6], 20, 21, 22, 23))
    assert probabilities is not None
    first, second = probabilities[0, :2].tolist()
    assert 0.3 < first < 0.6 and second / first > 0.7


def test_a_match_is_judged_once_and_whole_however_the_text_comes_past_it() -> None:
    quoting = [*QUOTE, 13, 14, 15, 16, 17, *QUOTE]

    def learned(*gains: list[int]) -> list[float]:
        drafter, text = LookupDrafter(Other(), order=3), sequence("a", quoting)
        for gain in gains:
            drafter.propose([text], SHAPE, CACHE)
            text.tokens.extend(gain)
        drafter.propose([text], SHAPE, CACHE)
        probabilities = drafter.propose([sequence("b", quoting)], SHAPE, CACHE).probabilities
        assert probabilities is not None
        return probabilities[0].tolist()

    assert learned([13], [14, 15], [16]) == learned([13, 14, 15, 16]) != learned()


def test_quotes_that_fail_become_less_likely(drafter: LookupDrafter) -> None:
    text, seen = sequence("a", [0, *QUOTE]), []
    for i in range(20):
        text.tokens.extend([1000 + i, *QUOTE])
        probabilities = drafter.propose([text], SHAPE, CACHE).probabilities
        if probabilities is not None:
            seen.append(float(probabilities[0, 0]))
    assert len(seen) > 5 and seen[-1] < seen[1]


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
    step = steps(drafter, other, sequence("a", [0, *QUOTE]))
    # The same twelve tokens are followed by something new each time.
    used = [step([1000 + i, *QUOTE]) for i in range(60)]
    assert used[:10] == [True] * 10 and not used[-1]
    # Unused, matches as long foretell four at a time again.
    for start in range(2000, 4000, 20):
        quote = list(range(start, start + 16))
        step([*quote, 17])
        used.append(step([start + 19, *quote[:12]]))
        step([*quote[12:], 18])
    assert used[-1]


def test_matches_are_judged_by_their_length(drafter: LookupDrafter, other: Other) -> None:
    step = steps(drafter, other, sequence("a", [*range(50, 80), 0, *QUOTE[:8]]))
    assert [step([1000 + i, *QUOTE[:8]]) for i in range(60)][-1] is False
    assert step(list(range(50, 62))), "twelve tokens have not disappointed anyone"


def test_short_matches_must_prove_right_before_they_are_used(drafter: LookupDrafter, other: Other) -> None:
    step = steps(drafter, other, sequence("a", [*QUOTE[:3], 0]))
    used = [(step([first, *QUOTE[:3]]), step([0, first + 1]))[0] for first in range(1000, 1200, 2)]
    assert used[0] is False and used[-1] is True


def test_what_one_request_taught_the_next_one_knows(drafter: LookupDrafter, other: Other) -> None:
    first = steps(drafter, other, sequence("a", [0, *QUOTE]))
    assert [first([1000 + i, *QUOTE]) for i in range(60)][-1] is False
    assert steps(drafter, other, sequence("b", [*QUOTE, 14]))(QUOTE) is False


def test_matches_yield_to_trees_that_foretell_more(drafter: LookupDrafter, other: Other) -> None:
    step = steps(drafter, other, sequence("a", [1, 2, 3, 4, 5, 9]))
    # The tree 90, 91 is mostly right; the match of 1, 2, 3, which is watched meanwhile, foretells one token.
    for first in range(1000, 3000, 20):
        step([first, 1, 2, 3])
        step([4, first + 1])
        for new in range(first + 2, first + 12):
            step([90, 91, new])
    assert step([9, 1, 2, 3]) is False
    # The tree is not right any more.
    for first in range(3000, 4000, 10):
        step([4, *range(first, first + 5)])
    assert step([9, 1, 2, 3]) is True


def test_a_tree_beside_which_a_match_was_used_is_judged_too(other: Other) -> None:
    drafter = LookupDrafter(other, order=3)
    alone, quoting = sequence("a", [50]), sequence("b", [1, 2, 3, 4, 5, 6, 1, 2, 3])
    for new in range(100, 200):
        drafter.propose([alone, quoting], SHAPE, CACHE)
        alone.tokens.extend((90, 91, new))
        quoting.tokens.extend((4, 5, 6, 1, 2, 3))
    assert drafter.expected_of_trees == pytest.approx(1, abs=0.1), "two tokens for the one, none for the other"


def test_the_longer_match_is_taken_before_the_newer_one(other: Other) -> None:
    drafter = LookupDrafter(other, order=3)
    long = list(range(10, 22))
    tree = drafter.propose([sequence("a", [*long, 1, 2, *long[-3:], 3, 4, *long])], SHAPE, CACHE)
    assert tree.tokens.tolist() == [[1, 2, *long[-3:-1]]]


def test_scratch_rows_are_the_others(drafter: LookupDrafter) -> None:
    assert drafter.target_scratch_rows(SHAPE) == 7
