"""Prompt lookup: what followed the last time the text went on like this (as in transformers' prompt lookup and vLLM's n-gram)."""

from __future__ import annotations

from collections.abc import Sequence as Many

from models.kv_cache import KVCache
from speculative.drafters.base import VerifiedTokens
from speculative.policy import DraftShape
from speculative.sequence import Sequence
from speculative.tree import DraftTree


class NgramDrafter:
    """Proposes the continuation of the most recent earlier occurrence of the last four, three or two tokens."""

    name = "ngram"
    taps: tuple[int, ...] = ()
    window: int | None = None
    caches: Many[KVCache] = ()

    def __init__(self) -> None:
        self._indices: dict[str, NgramIndex] = {}

    def extend(self, verified: VerifiedTokens, target_cache: KVCache) -> None:
        """Nothing to learn: the text itself is the model."""

    def propose(self, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache | None) -> DraftTree:
        """One chain per sequence, as long as the shape is deep; empty where nothing matches."""
        length = min(shape.depth, shape.nodes)
        return DraftTree.from_chains([self._chain(sequence, length) if sequence.drafts_here else [] for sequence in sequences])

    def _chain(self, sequence: Sequence, length: int) -> list[int]:
        index = self._indices.setdefault(sequence.request.request_id, NgramIndex((4, 3, 2)))
        return index.continuation(sequence.tokens, length)

    def forget(self, sequence: Sequence) -> None:
        """Drop its index."""
        self._indices.pop(sequence.request.request_id, None)

    def target_scratch_rows(self, shape: DraftShape) -> int:
        """None."""
        return 0


class NgramIndex:
    """Where each n-gram of one text last ended, for n in ``orders``, the longest first; kept as the text grows."""

    def __init__(self, orders: Many[int]) -> None:
        self._orders = orders
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def find(self, tokens: list[int]) -> int | None:
        """Where the text went on the last time that it ended as it does now, by its longest suffix that did; None if none did."""
        # The newest n-grams stay out: a suffix must not find itself.
        for end in range(self._indexed, len(tokens)):
            for order in self._orders:
                if end >= order:
                    self._ends[tuple(tokens[end - order : end])] = end
        self._indexed = max(self._indexed, len(tokens))
        for order in self._orders:
            found = self._ends.get(tuple(tokens[-order:])) if len(tokens) >= order else None
            if found is not None:
                return found
        return None

    def continuation(self, tokens: list[int], length: int) -> list[int]:
        """Up to ``length`` tokens that followed there; [] without a match."""
        found = self.find(tokens)
        return [] if found is None else tokens[found : found + length]
