"""Drafts that keep to their texts' grammars, and say what those leave no choice about."""

from __future__ import annotations

from collections.abc import Sequence as Many

from models.kv_cache import KVCache
from speculative.drafters.wrapper import DrafterWrapper
from speculative.policy import DraftShape
from speculative.sequence import Sequence
from speculative.tree import DraftTree

WORTHWHILE = 2
"""Forced tokens from which a chain of them beats another drafter's tree."""


class GrammarDrafter(DrafterWrapper):
    """Chains of what must come next, for texts whose grammar leaves no choice there; the other's trees otherwise, pruned."""

    def propose(self, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache | None) -> DraftTree:
        """A chain for each sequence whose text is forced, the other's tree for the rest."""
        chains = [_forced(sequence, shape.nodes) for sequence in sequences]
        if all(chain or not sequence.drafts_here for chain, sequence in zip(chains, sequences, strict=True)):
            return DraftTree.from_chains(chains)
        tree = self.other.propose(sequences, shape, target_cache)
        if any(chains):
            tree = tree.with_chains(chains)
        if all(sequence.sampler.grammar is None for sequence in sequences):
            return tree

        def keep(index: int, tokens: list[int], parents: list[int]) -> Many[int]:
            grammar = sequences[index].sampler.grammar
            return range(1, len(tokens) + 1) if grammar is None else grammar.following(tokens, parents)

        return tree.pruned(keep)


def _forced(sequence: Sequence, most: int) -> list[int]:
    grammar = sequence.sampler.grammar
    if grammar is None or grammar.ended or not sequence.drafts_here:
        return []
    tokens = grammar.forced(most)
    return tokens if len(tokens) >= WORTHWHILE else []
