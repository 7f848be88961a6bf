"""Draft trees of a batch, and what their nodes see of one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from speculative.request import OfferedTree

NOT_ASKED = float("nan")
"""What stands in the place of a probability where a drafter was not asked."""


class DraftTree:
    """One tree per sequence, padded to the widest.

    Row 0 is the root: the newest token, already chosen but not yet run through the target. Node j stands in row j + 1.
    ``tokens`` [B, N]; ``parents`` [B, N] holds rows, a parent's before its children's; ``sizes`` counts the real nodes of each
    sequence, which come first. Padding nodes have the root as parent. ``straight`` tells which sequences' drafts are chains that
    go straight to their place in the text instead of a slot's scratch rows, and may therefore be of any length; () is none.
    ``probabilities`` [B, N] is what a drafter gives the paths to its nodes, NOT_ASKED where it was not; None: it was not for any.
    The ``num_rows`` of a verification are the root and N nodes.

    Trees are made of tensors, as they come from a GPU, or of lists, as operators for CPUs give and take them: making a tensor
    of a few numbers takes longer than all that is done with them. What is asked for in the other form is made once.
    """

    def __init__(
        self,
        tokens: Tensor | list[list[int]],
        parents: Tensor | list[list[int]],
        sizes: tuple[int, ...],
        straight: tuple[bool, ...] = (),
        probabilities: Tensor | list[list[float]] | None = None,
    ) -> None:
        self._tokens, self._parents, self._probabilities = tokens, parents, probabilities
        self.sizes, self.straight = sizes, straight
        self.num_rows = 1 + (tokens.shape[1] if isinstance(tokens, Tensor) else len(tokens[0]))
        # Asked for several times a step: where there are lists already, a cached property would have to be asked first.
        if isinstance(tokens, list):
            self.token_lists = tokens
        if isinstance(parents, list):
            self.parent_lists = parents
        if isinstance(probabilities, list):
            self.probability_lists = probabilities

    @cached_property
    def tokens(self) -> Tensor:
        """The nodes' tokens [B, N]."""
        return _tensor(self._tokens, torch.long)

    @cached_property
    def parents(self) -> Tensor:
        """Rows of the nodes' parents [B, N]."""
        return _tensor(self._parents, torch.long)

    @cached_property
    def probabilities(self) -> Tensor | None:
        """How likely a drafter takes each node to be reached [B, N]."""
        return None if self._probabilities is None else _tensor(self._probabilities, torch.float32)

    @cached_property
    def token_lists(self) -> list[list[int]]:
        """``tokens``."""
        return self._tokens.tolist() if isinstance(self._tokens, Tensor) else self._tokens

    @cached_property
    def parent_lists(self) -> list[list[int]]:
        """``parents``."""
        return self._parents.tolist() if isinstance(self._parents, Tensor) else self._parents

    @cached_property
    def probability_lists(self) -> list[list[float]] | None:
        """``probabilities``."""
        known = self._probabilities
        return known.tolist() if isinstance(known, Tensor) else known

    @classmethod
    def empty(cls, batch: int) -> DraftTree:
        """No drafts: plain decoding."""
        none: list[list[int]] = [[]] * batch
        return cls(none, none, (0,) * batch)

    @classmethod
    def from_chains(cls, chains: list[list[int]], probabilities: Sequence[Sequence[float]] | None = None) -> DraftTree:
        """One chain of tokens per sequence, with the ``probabilities`` of its nodes; some may be empty."""
        return padded(chains, [list(range(len(chain))) for chain in chains], probabilities)

    def with_chains(self, chains: list[list[int]]) -> DraftTree:
        """These trees, but chains in the place of those for which there is one."""
        return self.with_trees([(chain, range(len(chain))) if chain else None for chain in chains])

    def with_offered(self, offered: Sequence[OfferedTree | None], most: int) -> DraftTree:
        """These trees, but offered ones for which there are; chains of more than ``most`` nodes go straight to their place."""
        trees = self.with_trees([None if each is None else (each.tokens, each.parents) for each in offered])
        straight = self.straight or (False,) * len(self.sizes)
        long = [each is not None and len(each.tokens) > most for each in offered]
        return trees.straightened([one or other for one, other in zip(straight, long, strict=True)])

    def with_trees(self, trees: Sequence[tuple[Sequence[int], Sequence[int]] | None]) -> DraftTree:
        """These trees, but others (tokens and parents) in the place of those for which there is one."""
        tokens, parents = list(self.token_lists), list(self.parent_lists)
        for index, (tree, size) in enumerate(zip(trees, self.sizes, strict=True)):
            if tree is None:
                tokens[index], parents[index] = tokens[index][:size], parents[index][:size]
            else:
                tokens[index], parents[index] = list(tree[0]), list(tree[1])
        known: list[list[float]] | None = None
        if self.probability_lists is not None:
            unknown = [NOT_ASKED] * max(map(len, tokens))
            known = [row if tree is None else unknown for tree, row in zip(trees, self.probability_lists, strict=True)]
        return padded(tokens, parents, known, self.straight)

    def only(self, rows: Sequence[int]) -> DraftTree:
        """Some sequences' trees."""

        def some(values: list[list[int]]) -> list[list[int]]:
            return [values[row] for row in rows]

        straight = tuple(self.straight[row] for row in rows) if self.straight else ()
        known = None if self.probability_lists is None else [self.probability_lists[row] for row in rows]
        return DraftTree(some(self.token_lists), some(self.parent_lists), tuple(self.sizes[row] for row in rows), straight, known)

    def cut(self, most: int) -> DraftTree:
        """The first ``most`` nodes of each tree."""
        sizes = tuple(min(size, most) for size in self.sizes)
        if isinstance(self._tokens, Tensor):
            known = None if self.probabilities is None else self.probabilities[:, :most]
            return DraftTree(self.tokens[:, :most], self.parents[:, :most], sizes, self.straight, known)

        def first(values: list[list[int]]) -> list[list[int]]:
            return [row[:most] for row in values]

        kept = None if self.probability_lists is None else [row[:most] for row in self.probability_lists]
        return DraftTree(first(self.token_lists), first(self.parent_lists), sizes, self.straight, kept)

    def pruned(self, keep: Callable[[int, list[int], list[int]], Sequence[int]]) -> DraftTree:
        """These trees without the rows that are not kept.

        ``keep`` is given a tree's number, tokens and parents without padding, and gives its rows that stay, ascending; every
        kept row's parent is kept too.
        """
        tokens: list[list[int]] = []
        parents: list[list[int]] = []
        known: list[list[float]] | None = None if self.probability_lists is None else []
        for index, (some, above) in enumerate(zip(self.token_lists, self.parent_lists, strict=True)):
            rows = keep(index, some[: self.sizes[index]], above[: self.sizes[index]])
            place = {0: 0} | {row: number for number, row in enumerate(rows, 1)}
            tokens.append([some[row - 1] for row in rows])
            parents.append([place[above[row - 1]] for row in rows])
            if known is not None and self.probability_lists is not None:
                known.append([self.probability_lists[index][row - 1] for row in rows])
        return padded(tokens, parents, known)

    def straightened(self, straight: Sequence[bool]) -> DraftTree:
        """The same drafts, the chains among them that are told so going straight to their place."""
        return DraftTree(self._tokens, self._parents, self.sizes, tuple(straight), self._probabilities)


def padded(
    tokens: list[list[int]],
    parents: list[list[int]],
    probabilities: Sequence[Sequence[float]] | None = None,
    straight: tuple[bool, ...] = (),
) -> DraftTree:
    """Trees of these nodes, of as many of which as begin each list the ``probabilities`` are told; padded as DraftTree says."""
    sizes = tuple(map(len, tokens))
    width = max(sizes, default=0)

    def filled(values: list[list[int]]) -> list[list[int]]:
        return [row if len(row) == width else row + [0] * (width - len(row)) for row in values]

    known = None if probabilities is None else [[*row[:width], *[0.0] * (width - len(row))] for row in probabilities]
    return DraftTree(filled(tokens), filled(parents), sizes, straight, known)


def _tensor(values: Tensor | list[list[int]] | list[list[float]], dtype: torch.dtype) -> Tensor:
    if isinstance(values, Tensor):
        return values
    return torch.tensor(values, dtype=dtype).view(len(values), -1 if values[0] else 0)


def children(tokens: Sequence[int], parents: Sequence[int]) -> dict[tuple[int, int], int]:
    """The row that each row's child with a token has, by (row, token); of two siblings with one token the first counts."""
    return {(parent, token): row for row, (token, parent) in reversed(list(enumerate(zip(tokens, parents, strict=True), 1)))}


def ancestors(parents: Tensor, most: int) -> Tensor:
    """What the rows of trees see of one another: themselves, their ancestors and the root, boolean [B, N+1, N+1].

    ``parents`` [B, N] as in DraftTree, ``most`` a bound on N.
    """
    rows = parents.shape[1] + 1
    ancestor = F.pad(parents, (1, 0))  # the root's is itself
    seen = torch.eye(rows, dtype=torch.bool, device=parents.device).expand(parents.shape[0], -1, -1)
    # Doubling: a row sees what it sees already, and what the furthest of those sees: log2(rows) steps instead of a walk.
    covered = 1
    while covered <= most:
        seen = seen | seen.gather(1, ancestor.unsqueeze(-1).expand(-1, -1, rows))
        ancestor = ancestor.gather(1, ancestor)
        covered *= 2
    return seen
