"""Drafts from what callers predict, and from another drafter where an answer has left its prediction."""

from __future__ import annotations

from models.kv_cache import KVCache
from speculative.drafters.wrapper import DrafterWrapper
from speculative.policy import DraftShape
from speculative.sequence import Sequence
from speculative.tree import DraftTree


class PredictionDrafter(DrafterWrapper):
    """Chains as long as predictions hold, far beyond ``shape``: they go straight to their place in the text."""

    def propose(self, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache | None) -> DraftTree:
        """A chain for each sequence that follows its prediction, the other's tree for the rest."""
        chains = [_chain(sequence) for sequence in sequences]
        if not any(chains):
            return self.other.propose(sequences, shape, target_cache)
        if all(chain or not sequence.drafts_here for chain, sequence in zip(chains, sequences, strict=True)):
            tree = DraftTree.from_chains(chains)
        else:
            tree = self.other.propose(sequences, shape, target_cache).with_chains(chains)
        return tree.straightened([bool(chain) for chain in chains])


def _chain(sequence: Sequence) -> list[int]:
    if sequence.prediction is None or not sequence.drafts_here:
        return []
    # The last token of the room is the target's own.
    return sequence.prediction.draft(sequence.max_length - len(sequence.tokens) - 1)
