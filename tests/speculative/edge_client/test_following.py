"""What is sent while a tree is under way."""

import random

import pytest

from speculative.edge.following import follow_up
from speculative.remote.grafting import graft
from speculative.request import OfferedTree

FIRST = OfferedTree(4, (1, 2, 3), (0, 0, 1))  # 1 3, and 2


def test_what_may_come_after_a_tree_is_kept_with_what_leads_there() -> None:
    # 1 3 6 7, where 6 may be the target's own token behind the whole first branch; 1 4 5, where the second could have gone on.
    larger = OfferedTree(4, (1, 2, 3, 4, 5, 6, 7), (0, 0, 1, 1, 4, 3, 6))
    assert follow_up(FIRST, larger, 8) == OfferedTree(4, (1, 3, 4, 5, 6, 7), (0, 1, 1, 3, 2, 5))


def test_the_likeliest_come_first_where_there_is_no_room_for_all() -> None:
    larger = OfferedTree(4, (1, 2, 3, 4, 5, 6, 7), (0, 0, 1, 1, 4, 3, 6))
    assert follow_up(FIRST, larger, 5) == OfferedTree(4, (1, 4, 5), (0, 1, 2))
    assert follow_up(FIRST, larger, 2) is None


@pytest.mark.parametrize(
    "larger",
    [FIRST, OfferedTree(4), OfferedTree(4, (1, 2, 3, 8), (0, 0, 1, 3)), OfferedTree(4, (9, 8), (0, 0))],
    ids=["nothing more", "nothing", "a token behind which nothing is drafted", "others of which the same holds"],
)
def test_where_nothing_could_follow_nothing_is_sent(larger: OfferedTree) -> None:
    assert follow_up(FIRST, larger, 64) is None


def test_whatever_comes_of_the_first_the_rest_is_a_draft_or_gone() -> None:
    """As the server does it: where a path of the first tree and another token lead into the second, something is left to verify."""
    random.seed(0)
    kept = 0
    for _ in range(300):
        first, larger = (_tree(random.randrange(1, size)) for size in (12, 60))
        following = follow_up(first, larger, 24)
        if following is None:
            continue
        assert len(following.tokens) <= 24
        children: dict[int, dict[int, int]] = {}
        for row, (token, parent) in enumerate(zip(first.tokens, first.parents, strict=True), 1):
            children.setdefault(parent, {})[token] = row
        paths = [(0, ())]
        for at, path in paths:
            paths += [(row, (*path, token)) for token, row in children.get(at, {}).items()]
            for own in set(range(6)) - children.get(at, {}).keys():
                left = graft(following.tokens, following.parents, (*path, own))
                assert left is None or left.tokens
                kept += left is not None
    assert kept > 100


def _tree(size: int) -> OfferedTree:
    """Any tree whose siblings differ, of tokens 0 to 5."""
    tokens: list[int] = []
    parents: list[int] = []
    while len(tokens) < size:
        parent, token = random.randrange(len(tokens) + 1), random.randrange(6)
        if all((parent, token) != each for each in zip(parents, tokens, strict=True)):
            tokens.append(token)
            parents.append(parent)
    return OfferedTree(4, tuple(tokens), tuple(parents))
