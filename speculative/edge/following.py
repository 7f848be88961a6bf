"""What an edge sends while a tree is under way: where the text may go on once that has been verified."""

from __future__ import annotations

from bisect import bisect_right

from speculative.request import OfferedTree
from speculative.tree import children


def follow_up(first: OfferedTree, larger: OfferedTree, most: int) -> OfferedTree | None:
    """The part of ``larger``, drafted for the same text as ``first``, that is of use once ``first`` has been verified.

    The text then has a path of ``first`` and a token of the target's own that ``first`` has not. If ``larger`` has that token
    there, and others behind it, these can be verified at once. What is returned holds all such tokens with what follows them and
    what leads to them: at most ``most`` nodes, of the most likely ones, as ``larger`` has them best first. None if there are none.
    """
    count = bisect_right(range(len(larger.tokens) + 1), most, key=lambda count: sum(_useful(first, larger, count))) - 1
    useful = _useful(first, larger, count)
    place, tokens, parents = {0: 0}, [], []
    for row, (token, parent, keep) in enumerate(zip(larger.tokens, larger.parents, useful, strict=False), 1):
        if keep:
            tokens.append(token)
            parents.append(place[parent])
            place[row] = len(tokens)
    return OfferedTree(larger.length, tuple(tokens), tuple(parents)) if tokens else None


def _useful(first: OfferedTree, larger: OfferedTree, count: int) -> list[bool]:
    """Which of the first ``count`` nodes of ``larger`` lead to one that may be verified after ``first``, or are one."""
    known = children(first.tokens, first.parents)
    # Rows of ``larger`` that stand in ``first`` too, with their row there.
    inside = {0: 0}
    useful = [False] * count
    for row, (token, parent) in enumerate(zip(larger.tokens[:count], larger.parents, strict=False), 1):
        if parent in inside:
            if (same := known.get((inside[parent], token))) is not None:
                inside[row] = same
        else:
            useful[row - 1] = True
    for row in range(count, 0, -1):
        if useful[row - 1] and larger.parents[row - 1]:
            useful[larger.parents[row - 1] - 1] = True
    return useful
