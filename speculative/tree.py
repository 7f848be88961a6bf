"""Draft trees of a batch, and what their nodes see of one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from speculative.request import OfferedTree


@dataclass(frozen=True, slots=True)
class DraftTree:
    """One tree per sequence, padded to the widest.

    Row 0 is the root: the newest token, already chosen but not yet run through the target. Node j stands in row j + 1.
    ``tokens`` [B, N]; ``parents`` [B, N] holds rows, a parent's before its children's; ``sizes`` counts the real nodes of each
    sequence, which come first. Padding nodes have the root as parent. ``straight`` tells which sequences' drafts are chains that
    go straight to their place in the text instead of a slot's scratch rows, and may therefore be of any length; () is none.
    ``probabilities`` [B, N] is what a drafter gives the paths to its nodes, NaN where it was not asked; None: it was not for any.
    """

    tokens: Tensor
    parents: Tensor
    sizes: tuple[int, ...]
    straight: tuple[bool, ...] = ()
    probabilities: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows of a verification: the root and N nodes."""
        return self.tokens.shape[1] + 1

    @classmethod
    def empty(cls, batch: int) -> DraftTree:
        """No drafts: plain decoding."""
        none = torch.empty(batch, 0, dtype=torch.long)
        return cls(none, none, (0,) * batch)

    @classmethod
    def from_chains(cls, chains: list[list[int]]) -> DraftTree:
        """One chain of tokens per sequence; some may be empty."""
        width = max((len(chain) for chain in chains), default=0)
        tokens = torch.tensor([chain + [0] * (width - len(chain)) for chain in chains], dtype=torch.long).view(len(chains), width)
        parents = torch.tensor([[j if j < len(chain) else 0 for j in range(width)] for chain in chains], dtype=torch.long)
        return cls(tokens, parents.view(len(chains), width), tuple(len(chain) for chain in chains))

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
        tokens, parents, sizes = self.tokens.tolist(), self.parents.tolist(), list(self.sizes)
        for index, tree in enumerate(trees):
            if tree is not None:
                tokens[index], parents[index], sizes[index] = list(tree[0]), list(tree[1]), len(tree[0])
        trees_of_all = replace(padded(tokens, parents, sizes, self.tokens.device), straight=self.straight)
        if self.probabilities is None:
            return trees_of_all
        others = torch.tensor([tree is not None for tree in trees], device=self.tokens.device).unsqueeze(1)
        known = F.pad(self.probabilities, (0, trees_of_all.tokens.shape[1] - self.tokens.shape[1]))
        return replace(trees_of_all, probabilities=known.masked_fill(others, float("nan")))

    def expecting(self, probabilities: Sequence[Sequence[float]]) -> DraftTree:
        """The same drafts, each tree's first nodes having these ``probabilities``."""
        width = self.tokens.shape[1]
        known = [[*each, *[0.0] * (width - len(each))] for each in probabilities]
        return replace(self, probabilities=torch.tensor(known, device=self.tokens.device).view(self.tokens.shape))

    def only(self, rows: Sequence[int]) -> DraftTree:
        """Some sequences' trees."""
        straight = tuple(self.straight[row] for row in rows) if self.straight else ()
        known = None if self.probabilities is None else self.probabilities[rows]
        return DraftTree(self.tokens[rows], self.parents[rows], tuple(self.sizes[row] for row in rows), straight, known)

    def cut(self, most: int) -> DraftTree:
        """The first ``most`` nodes of each tree."""
        known = None if self.probabilities is None else self.probabilities[:, :most]
        sizes = tuple(min(size, most) for size in self.sizes)
        return DraftTree(self.tokens[:, :most], self.parents[:, :most], sizes, self.straight, known)

    def pruned(self, keep: Callable[[int, list[int], list[int]], Sequence[int]]) -> DraftTree:
        """These trees without the rows that are not kept.

        ``keep`` is given a tree's number, tokens and parents without padding, and gives its rows that stay, ascending; every
        kept row's parent is kept too.
        """
        tokens: list[list[int]] = []
        parents: list[list[int]] = []
        kept: list[Sequence[int]] = []
        for index, (some, above) in enumerate(zip(self.tokens.tolist(), self.parents.tolist(), strict=True)):
            rows = keep(index, some[: self.sizes[index]], above[: self.sizes[index]])
            place = {0: 0} | {row: number for number, row in enumerate(rows, 1)}
            tokens.append([some[row - 1] for row in rows])
            parents.append([place[above[row - 1]] for row in rows])
            kept.append(rows)
        left = padded(tokens, parents, list(map(len, tokens)), self.tokens.device)
        if self.probabilities is None:
            return left
        known = torch.zeros_like(self.probabilities[:, : left.tokens.shape[1]])
        for index, rows in enumerate(kept):
            known[index, : len(rows)] = self.probabilities[index, [row - 1 for row in rows]]
        return replace(left, probabilities=known)

    def straightened(self, straight: Sequence[bool]) -> DraftTree:
        """The same drafts, the chains among them that are told so going straight to their place."""
        return replace(self, straight=tuple(straight))


def padded(tokens: list[list[int]], parents: list[list[int]], sizes: list[int], device: torch.device) -> DraftTree:
    """Trees of these tokens and parents, of which so many in each are real, as DraftTree pads them."""
    width = max(map(len, tokens), default=0)
    filled = [[row + [0] * (width - len(row)) for row in rows] for rows in (tokens, parents)]
    both = torch.tensor(filled, dtype=torch.long, device=device).view(2, len(sizes), width)
    return DraftTree(both[0], both[1], tuple(sizes))


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
