"""Drafts that keep to their texts' grammars, and say what those leave no choice about."""

from __future__ import annotations

from models.kv_cache import KVCache
from speculative.drafters.wrapper import DrafterWrapper
from speculative.policy import DraftShape
from speculative.sequence import Sequence
from speculative.tree import DraftTree

WORTHWHILE = 2
"""Forced tokens from which a chain of them beats another drafter's tree."""


class GrammarDrafter(DrafterWrapper):
    """Chains of what must come next, for texts whose grammar leaves no choice there; the other's trees otherwise, pruned."""

    def propose(self, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache) -> DraftTree:
        """A chain for each sequence whose text is forced, the other's tree for the rest."""
        chains = [_forced(sequence)[: shape.nodes] for sequence in sequences]
        if all(chain or not sequence.speculative for chain, sequence in zip(chains, sequences, strict=True)):
            return DraftTree.from_chains(chains)
        tree = self.other.propose(sequences, shape, target_cache)
        if any(chains):
            tree = tree.with_chains(chains)
        if all(sequence.sampler.grammar is None for sequence in sequences):
            return tree
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        return tree.pruned(
            [
                list(range(1, size + 1))
                if (grammar := sequence.sampler.grammar) is None
                # A chain is what comes next as text; tokens are its writer's choice.
                else grammar.following(tokens[index][:size], parents[index][:size])
                for index, (sequence, size) in enumerate(zip(sequences, tree.sizes, strict=True))
            ]
        )


def _forced(sequence: Sequence) -> list[int]:
    grammar = sequence.sampler.grammar
    if grammar is None or grammar.ended or not sequence.speculative:
        return []
    tokens = grammar.forced()
    return tokens if len(tokens) >= WORTHWHILE else []
