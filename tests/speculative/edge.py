"""A drafter of a bundle beside the whole one: told what a server would tell, it must propose the same trees."""

from __future__ import annotations

import torch
from torch import Tensor

from models.edge_bundle import EdgeBundle
from models.kv_cache import KVCache
from speculative.drafters.base import VerifiedTokens
from speculative.drafters.moa import MoADrafter
from speculative.drafters.moa_edge import EdgeDrafter, ReceivedMemory
from speculative.drafters.wrapper import DrafterWrapper, innermost
from speculative.engine import Engine
from speculative.policy import DraftShape
from speculative.sequence import Sequence
from speculative.tree import DraftTree


class Beside(DrafterWrapper):
    """Decodes with the whole drafter, and keeps what both of them proposed."""

    def __init__(self, whole: MoADrafter, edge: EdgeDrafter) -> None:
        super().__init__(whole)
        self.whole, self.edge = whole, edge
        self.caches = [*whole.caches, *edge.caches]
        self.trees: list[tuple[DraftTree, DraftTree]] = []

    def extend(self, verified: VerifiedTokens, target_cache: KVCache) -> None:
        self.whole.extend(verified, target_cache)
        self.edge.extend(received(self.whole, verified))
        if self.whole.config.paired:  # what came before is complete by now, which a server waits for
            ours, theirs = self.whole.caches[1], self.edge.caches[1]
            before = ours.flat_rows(verified.slots, (verified.positions - 1).clamp(min=0))
            theirs.write(0, before, ours.gather(before)[:, 0])

    def propose(self, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache) -> DraftTree:
        tree = self.whole.propose(sequences, shape, target_cache)
        if self.whole.config.paired:
            self.edge.extend(newest_pairs(self.whole, sequences))
        self.trees.append((tree, self.edge.propose(sequences, shape, None)))
        return tree

    def assert_same_trees(self) -> None:
        assert len(self.trees) > 5
        for whole, edge in self.trees:
            assert torch.equal(whole.tokens, edge.tokens) and torch.equal(whole.parents, edge.parents)
            assert whole.sizes == edge.sizes


def received(whole: MoADrafter, verified: VerifiedTokens) -> ReceivedMemory:
    """What the drafter beside the target has made of ``verified``, as a server would send it."""
    ca, *memories = whole.caches[1:]

    def rows(cache: KVCache, slots: Tensor, positions: Tensor) -> Tensor:
        return cache.gather(cache.flat_rows(slots, positions))[:, 0]

    crossing = rows(ca, verified.slots, verified.positions)
    if not memories:
        return ReceivedMemory(verified.slots, verified.positions, verified.token_ids, crossing)
    slots = verified.slots.unique()
    last = torch.stack([verified.positions[verified.slots == slot].max() for slot in slots])
    newest = rows(memories[0], slots, last)
    return ReceivedMemory(verified.slots, verified.positions, verified.token_ids, crossing, slots, newest)


def newest_pairs(whole: MoADrafter, sequences: list[Sequence]) -> ReceivedMemory:
    """The newest memory of texts, which the token that follows it completed only now."""
    ca, memories = whole.caches[1:]
    numbers = [(each.slot, each.num_computed, each.tokens[each.num_computed - 1]) for each in sequences]
    slots, ends, token_ids = torch.tensor(numbers).T.contiguous().unbind()
    crossing, newest = (cache.gather(cache.flat_rows(slots, places))[:, 0] for cache, places in ((ca, ends - 1), (memories, ends)))
    return ReceivedMemory(slots, ends - 1, token_ids, crossing, slots, newest)


def put_beside(engine: Engine, bundle: EdgeBundle) -> Beside:
    """Let an engine with a MoA drafter (and no prefix cache) draft with a bundle's too."""
    whole = innermost(engine.drafter)
    assert isinstance(whole, MoADrafter)
    slots, length = engine.cache.num_slots, engine.cache.length
    edge = EdgeDrafter(bundle.drafter, bundle.target, slots, length, engine.largest_shape, whole.window)
    edge.pack()
    engine.drafter = beside = Beside(whole, edge)
    return beside
