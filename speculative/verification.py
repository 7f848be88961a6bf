"""Verification: which drafted tokens the target would have chosen itself. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from speculative.tree import children


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The accepted path of one tree.

    ``rows`` are the accepted nodes' rows, root excluded; ``tokens`` are their tokens followed by the bonus token, so there is
    always one more token than rows.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]


def verify_tree(tokens: Sequence[int], parents: Sequence[int], choose: Callable[[int], int], limit: int) -> Acceptance:
    """Walk one tree from its root, taking at most ``limit`` tokens.

    ``choose(row)`` is the target's token after the node in ``row``; it is asked once for each token, in the text's order. The walk
    goes to the child that carries the token; when there is none it is the bonus token. Every token returned is thus the
    target's own choice.
    """
    following = children(tokens, parents)
    rows: list[int] = []
    chosen: list[int] = []
    row = 0
    while True:
        token = choose(row)
        chosen.append(token)
        child = following.get((row, token))
        if child is None or len(chosen) == limit:
            return Acceptance(tuple(rows), tuple(chosen))
        rows.append(child)
        row = child
