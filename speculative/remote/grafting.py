"""What is left of a tree that was drafted before its text went on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from speculative.tree import children


@dataclass(frozen=True, slots=True)
class Graft:
    """A tree that hangs at the text's end: tokens and parents as in DraftTree, and each node's row in the tree that was sent."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    rows: tuple[int, ...]

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The rows, in the tree that was sent, that carry ``tokens`` from the root down."""
        known, path, root = children(self.tokens, self.parents), [], 0
        for token in tokens:
            root = known[root, token]
            path.append(self.rows[root - 1])
        return path


def graft(tokens: Sequence[int], parents: Sequence[int], since: Sequence[int]) -> Graft | None:
    """A tree that hangs where the text was before the tokens ``since`` came, moved to the text's end.

    None where these leave the tree: what was drafted then cannot come any more. Takes time in proportion to the tree and to
    ``since``.
    """
    if not since:
        return Graft(tuple(tokens), tuple(parents), tuple(range(1, len(tokens) + 1)))
    known = children(tokens, parents)
    root = 0
    for token in since:
        following = known.get((root, token))
        if following is None:
            return None
        root = following
    place = {root: 0}
    rows: list[int] = []
    for row, parent in enumerate(parents, 1):
        if parent in place:
            rows.append(row)
            place[row] = len(rows)
    return Graft(tuple(tokens[row - 1] for row in rows), tuple(place[parents[row - 1]] for row in rows), tuple(rows))
