"""What is left of a tree that was drafted before its text went on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Graft:
    """A tree that hangs at the text's end: tokens and parents as in DraftTree, and each node's row in the tree that was sent."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    rows: tuple[int, ...]

    def path(self, tokens: Sequence[int]) -> list[int]:
        """The rows, in the tree that was sent, that carry ``tokens`` from the root down; of equal siblings the first."""
        path, root = [], 0
        for token in tokens:
            root = next(
                row
                for row, (each, parent) in enumerate(zip(self.tokens, self.parents, strict=True), 1)
                if parent == root and each == token
            )
            path.append(self.rows[root - 1])
        return path


def graft(tokens: Sequence[int], parents: Sequence[int], since: Sequence[int]) -> Graft | None:
    """A tree that hangs where the text was before the tokens ``since`` came, moved to the text's end.

    None where these leave the tree: what was drafted then cannot come any more. Of two siblings with one token the first counts,
    as in verification. Takes time in proportion to the tree and to ``since``.
    """
    if not since:
        return Graft(tuple(tokens), tuple(parents), tuple(range(1, len(tokens) + 1)))
    children = {(parent, token): row for row, (token, parent) in reversed(list(enumerate(zip(tokens, parents, strict=True), 1)))}
    root = 0
    for token in since:
        following = children.get((root, token))
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
