"""A drafter before another one."""

from __future__ import annotations

from typing import TypeVar

from models.kv_cache import KVCache
from speculative.drafters.base import Drafter, VerifiedTokens
from speculative.policy import DraftShape
from speculative.sequence import Sequence
from speculative.tree import DraftTree


class DrafterWrapper:
    """Passes everything on to ``other``; subclasses come between where they have something to do."""

    def __init__(self, other: Drafter) -> None:
        self.other = other
        self.name, self.taps, self.window, self.caches = other.name, other.taps, other.window, other.caches

    def extend(self, verified: VerifiedTokens, target_cache: KVCache) -> None:
        """As in Drafter."""
        self.other.extend(verified, target_cache)

    def propose(self, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache | None) -> DraftTree:
        """As in Drafter."""
        return self.other.propose(sequences, shape, target_cache)

    def forget(self, sequence: Sequence) -> None:
        """As in Drafter."""
        self.other.forget(sequence)

    def target_scratch_rows(self, shape: DraftShape) -> int:
        """As in Drafter."""
        return self.other.target_scratch_rows(shape)


D = TypeVar("D", Drafter, Drafter | None)


def innermost(drafter: D) -> D:
    """The drafter behind all wrappers."""
    while isinstance(drafter, DrafterWrapper):
        drafter = drafter.other
    return drafter
