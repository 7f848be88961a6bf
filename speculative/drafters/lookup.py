"""Drafts from the text itself where it repeats, and from another drafter where it does not.

Answers quote: names and dates of the question, a tool's arguments, lines of code. Where the last tokens stand earlier in the text,
what followed them there is as good a draft as a network's and costs nothing (prompt lookup, as in transformers and vLLM).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from models.kv_cache import KVCache
from speculative.drafters.base import Drafter, VerifiedTokens
from speculative.drafters.ngram import NgramIndex
from speculative.policy import DraftShape
from speculative.sequence import Sequence
from speculative.tree import DraftTree

WORTHWHILE = 2.0
"""Tokens that a request's matches must have foretold of late, on average, to be used: below, networks do better."""

_HOPED = 4.0
_WEIGHT = 0.3


@dataclass(slots=True)
class _Matches:
    """What one request's matches have foretold, whether they were used or not."""

    index: NgramIndex
    foretold: float = _HOPED
    last: tuple[int, list[int]] = field(default_factory=lambda: (0, []))

    def continuation(self, tokens: list[int], length: int) -> list[int]:
        """What follows the text so far by its own example; [] where nothing matches or matches have not held of late."""
        start, chain = self.last
        if chain:
            came = tokens[start : start + len(chain)]
            right = next((n for n, (a, b) in enumerate(zip(chain, came, strict=False)) if a != b), len(came))
            self.foretold += _WEIGHT * (right - self.foretold)
        chain = self.index.continuation(tokens, length)
        self.last = (len(tokens), chain)
        return chain if self.foretold >= WORTHWHILE else []


class LookupDrafter:
    """Looks up first, and asks ``other`` for a tree only when some sequence of the batch has no match of ``order`` tokens."""

    def __init__(self, other: Drafter, order: int) -> None:
        self.other, self.order, self.name = other, order, other.name
        self._matches: dict[str, _Matches] = {}

    def extend(self, verified: VerifiedTokens, target_cache: KVCache) -> None:
        """Pass on: it must know all of the text when it is asked."""
        self.other.extend(verified, target_cache)

    def forget(self, sequence: Sequence) -> None:
        """Drop its index."""
        self._matches.pop(sequence.request.request_id, None)
        self.other.forget(sequence)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Pass on."""
        self.other.move_slot(source, destination, length)

    def target_scratch_rows(self, shape: DraftShape) -> int:
        """The other's."""
        return self.other.target_scratch_rows(shape)

    def propose(self, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache) -> DraftTree:
        """A chain for each sequence with a match, the other's tree for the rest."""
        chains = [self._chain(sequence, shape.nodes) if sequence.speculative else [] for sequence in sequences]
        if all(chain or not sequence.speculative for chain, sequence in zip(chains, sequences, strict=True)):
            return DraftTree.from_chains(chains)
        tree = self.other.propose(sequences, shape, target_cache)
        return _with_chains(tree, chains) if any(chains) else tree

    def _chain(self, sequence: Sequence, length: int) -> list[int]:
        matches = self._matches.get(sequence.request.request_id)
        if matches is None:
            matches = self._matches[sequence.request.request_id] = _Matches(NgramIndex(self.order, self.order))
        return matches.continuation(sequence.tokens, length)


def behind_lookup(drafter: Drafter | None) -> Drafter | None:
    """The drafter that computes."""
    return drafter.other if isinstance(drafter, LookupDrafter) else drafter


def _with_chains(tree: DraftTree, chains: list[list[int]]) -> DraftTree:
    """The trees, chains in their place where there are some."""
    width = max(tree.tokens.shape[1], *(len(chain) for chain in chains))
    tokens, parents, sizes = tree.tokens.tolist(), tree.parents.tolist(), list(tree.sizes)
    for index, chain in enumerate(chains):
        if chain:
            tokens[index], parents[index], sizes[index] = chain, list(range(len(chain))), len(chain)
    tokens, parents = ([row + [0] * (width - len(row)) for row in rows] for rows in (tokens, parents))
    device = tree.tokens.device
    return DraftTree(torch.tensor(tokens, device=device), torch.tensor(parents, device=device), tuple(sizes))
