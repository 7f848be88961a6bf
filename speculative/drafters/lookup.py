"""Drafts from the text itself where it repeats, and from another drafter where it does not.

Answers quote: names and dates of the question, a tool's arguments, lines of code. Where the last tokens stand earlier in the text,
what followed them there is as good a draft as a network's and costs nothing (prompt lookup, as in transformers and vLLM).
"""

from __future__ import annotations

from dataclasses import dataclass

from models.kv_cache import KVCache
from speculative.common_prefix import common_prefix
from speculative.drafters.base import Drafter
from speculative.drafters.ngram import NgramIndex
from speculative.drafters.wrapper import DrafterWrapper
from speculative.policy import DraftShape
from speculative.sequence import Sequence
from speculative.tree import DraftTree

WORTHWHILE = 1.25
"""Tokens that a match must be expected to foretell to be used: below, a network's tree is worth its cost."""

_HOPED = 3.0
_WEIGHT = 0.05
_LONGEST = 16


@dataclass(slots=True)
class _Match:
    """What followed the text's last ``length`` tokens earlier, and where the text stood when it was found."""

    start: int
    length: int
    chain: list[int]

    def foretold(self, tokens: list[int]) -> int | None:
        """How many tokens it got right; None while that cannot be said."""
        came = tokens[self.start : self.start + len(self.chain)]
        right = common_prefix(self.chain, came)
        return None if right == len(came) < len(self.chain) else right


@dataclass(slots=True)
class _Text:
    """One request's: its index, and the match whose worth is still to be seen."""

    index: NgramIndex
    pending: _Match | None = None


class LookupDrafter(DrafterWrapper):
    """Looks up first, and asks ``other`` for a tree only when some sequence of the batch has no match that is worth it.

    A match has ``order`` tokens or more. How many tokens it is expected to foretell is learned from those before it that were as
    long, of all requests and whether they were used or not.
    """

    def __init__(self, other: Drafter, order: int) -> None:
        super().__init__(other)
        self.order = order
        self._texts: dict[str, _Text] = {}
        self._expected: dict[int, float] = {}

    def forget(self, sequence: Sequence) -> None:
        """Drop its index."""
        self._texts.pop(sequence.request.request_id, None)
        super().forget(sequence)

    def propose(self, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache | None) -> DraftTree:
        """A chain for each sequence with a match, the other's tree for the rest."""
        chains = [self._chain(sequence, shape.nodes) if sequence.drafts_here else [] for sequence in sequences]
        if all(chain or not sequence.drafts_here for chain, sequence in zip(chains, sequences, strict=True)):
            return DraftTree.from_chains(chains)
        tree = self.other.propose(sequences, shape, target_cache)
        return tree.with_chains(chains) if any(chains) else tree

    def _chain(self, sequence: Sequence, most: int) -> list[int]:
        """What the text's own example says that comes next; [] where nothing matches, or matches as long have not held of late."""
        text, tokens = self._texts.get(sequence.request.request_id), sequence.tokens
        if text is None:
            text = self._texts[sequence.request.request_id] = _Text(NgramIndex(self.order, self.order))
        if text.pending is not None and (right := text.pending.foretold(tokens)) is not None:
            expected = self._expected.get(text.pending.length, _HOPED)
            self._expected[text.pending.length] = expected + _WEIGHT * (right - expected)
            text.pending = None
        found = text.index.find(tokens)
        if found is None:
            return []
        match = _Match(len(tokens), _matching(tokens, found), tokens[found : found + most])
        text.pending = text.pending or match
        return match.chain if self._expected.get(match.length, _HOPED) >= WORTHWHILE else []


def _matching(tokens: list[int], end: int) -> int:
    """How many of the last tokens stand before ``end`` too, up to the most that matters."""
    length = 0
    while length < min(end, _LONGEST) and tokens[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length
