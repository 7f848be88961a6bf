"""Tree drafting with a Mixture-of-Attentions drafter, batched over sequences.

What drafting needs of memory and SA's keys and values are kept for verified tokens; tree nodes live in SA's scratch rows while a
tree grows.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from models.kv_cache import KVCache
from models.llama import Llama
from models.loader import optimize_for_inference
from models.moa import MoA
from speculative.drafters.base import VerifiedTokens
from speculative.drafters.growth import Candidates, Frontier, Level
from speculative.drafters.moa_network import MoANetwork
from speculative.drafters.tree_drafter import TreeDrafter, frontier_plan, root_mask
from speculative.errors import EngineLoadError
from speculative.policy import DraftShape


class MoADrafter(TreeDrafter):
    """Trees by a Mixture-of-Attentions drafter.

    ``moa`` is made ready for serving and is of no use for training afterwards. Of prompts SA and CA read the last ``window`` tokens
    (None: all): memory costs a prompt four tenths of its prefill, and what is far back tells a drafter little.
    """

    name = "moa"

    def __init__(self, moa: MoA, target: Llama, num_slots: int, length: int, shape: DraftShape, window: int | None = None) -> None:
        self.target, self.window = target, window
        moa.read_cache_layout()
        if target.device.type == "cpu" and target.dtype == torch.bfloat16:
            # LSA has a row per layer of every token: enough for bfloat16 products, and the target's cache is read as it is.
            if moa.lsa is not None:
                moa.lsa.to(torch.bfloat16)
            moa.to_memory.to(torch.bfloat16)
            if moa.entry is not None:
                moa.entry.from_hidden.to(torch.bfloat16)
        self.network = MoANetwork(moa, target)
        self.config = config = moa.config
        self.borrowed = config.target_layer_inference
        head_dim = config.target.head_dim
        block = moa.block
        if block is not None and shape.depth > block.size:
            raise EngineLoadError(
                f"this drafter was trained for trees of {block.size} levels: lower --draft-depth ({shape.depth}) to that"
            )
        self.breadth, self.scratch = shape.breadth, 1 + shape.depth * shape.breadth if block is None else block.size
        device, dtype = target.device, self.network.dtype
        sa_cache = KVCache(1, num_slots, self.scratch, length, config.sa_num_kv_heads, head_dim, dtype=dtype, device=device)
        ca_cache = KVCache(1, num_slots, 0, length, config.ca_num_kv_heads, head_dim, dtype=dtype, device=device)
        caches = [sa_cache, ca_cache]
        if moa.entry is not None:
            self.taps = (config.target.num_layers,)
            caches.append(KVCache(1, num_slots, 0, length, 1, config.target.hidden_size // 2, dtype=dtype, device=device))
        moa.rotary.reserve(length + self.scratch, moa.sa.qkv.weight)
        moa.layer_rotary.reserve(config.target.num_layers, moa.to_memory.weight)
        super().__init__(device, caches)

    def pack(self) -> None:
        """Prepare the network's weights for inference without compiled graphs."""
        optimize_for_inference(self.network.moa)
        if self.network.head is not self.target.lm_head:
            self.network.head.pack()

    def target_scratch_rows(self, shape: DraftShape) -> int:
        """Borrowed layers keep the keys and values of drafted nodes in the target's scratch rows."""
        return 1 + shape.depth * shape.breadth if self.borrowed else 0

    def extend(self, verified: VerifiedTokens, target_cache: KVCache) -> None:
        """LSA on newly verified tokens, CA's keys and values of their memory, SA's of their embeddings."""
        token_ids, slots, positions, hidden = verified.token_ids, verified.slots, verified.positions, verified.tapped
        if remember := self.compiled.get("remember"):
            windows = (layer for kv in (target_cache, *self.caches) for layer in kv.window(0, kv.num_slots))
            remember([token_ids, slots, positions, *(() if hidden is None else (hidden,)), *windows])
            return
        kv = target_cache.gather(target_cache.flat_rows(slots, positions))
        rows = tuple(each.flat_rows(slots, positions) for each in self.caches)
        self.network.remember(token_ids, positions, kv, hidden, self.caches, rows)

    def memory(self, slot: int, first: int, end: int) -> tuple[Tensor, Tensor | None]:
        """CA's keys and values [n, 2·n_kv·d] of positions ``first`` … ``end``, and with an entry the newest memory [1, E]."""
        ca, *memories = self.caches[1:]
        rows = ca.data[0, ca.flat_row(slot, first) : ca.flat_row(slot, end)]
        newest = memories[0].flat_row(slot, end - 1) if memories else None
        return rows, None if newest is None else memories[0].data[0, newest : newest + 1]

    def inherited(self, lengths: Tensor) -> Tensor:
        """In a block no state; else the mask of the scratch row that is the root's own."""
        batch, dtype = len(lengths), self.network.dtype
        if self.network.moa.block is None:
            return root_mask(batch, self.scratch, dtype, self.device)
        return _no_state(batch, self.target.config.hidden_size, dtype, self.device)

    def grow(
        self, level: Level, known: Tensor | None, breadth: int, target_cache: KVCache
    ) -> tuple[Tensor | None, Candidates, Frontier, Tensor]:
        """As in TreeDrafter; what ``MoANetwork.block`` tells is known from the first level on."""
        if self.network.moa.block is not None and known is None:
            return self._open(level, breadth, target_cache)
        return known, *self._expand(level, known, breadth, target_cache)

    def _open(self, level: Level, breadth: int, target_cache: KVCache) -> tuple[Tensor, Candidates, Frontier, Tensor]:
        """The first level of a block: what it tells, then as ``_expand``."""
        roots = level.frontier.tokens
        if graph := self.compiled.get("block"):
            # It comes with a greedy level of the drafter's own breadth.
            out = graph([*level.frontier, *level.grown, *level.text, *level.place, level.temperature, *self._windows(len(roots))])
            if level.sampling is None and breadth == self.breadth:
                return out[0], Candidates(*out[1:4]), Frontier(*out[4:8]), out[8]
            known = out[0]
        else:
            known = self.network.block(roots, level.text, self.caches)
        return known, *self._expand(level, known, breadth, target_cache)

    def _expand(
        self, level: Level, known: Tensor | None, breadth: int, target_cache: KVCache
    ) -> tuple[Candidates, Frontier, Tensor]:
        """All candidates, the next frontier and its reach; ``known`` is a block's."""
        frontier, grown, text, place, temperature, sampling = level
        # A compiled level has its breadth built in.
        graph = self.compiled.get("level" if sampling is None else "sampled_level") if breadth == self.breadth else None
        if graph is not None:
            beside = self._windows(len(grown.tokens)) if known is None else [known]
            out = graph([*frontier, *grown, *text, *place, temperature, *(sampling or ()), *beside])
            return Candidates(*out[:3]), Frontier(*out[3:7]), out[7]
        if known is not None:
            return self.network.expand(level, self.network.states(level, known), breadth)
        feature = self.network.feature(level, self.caches)
        if self.borrowed:
            feature = self._through_borrowed(level, feature, target_cache)
        return self.network.expand(level, feature.unflatten(0, frontier.tokens.shape), breadth)

    def _windows(self, batch: int) -> list[Tensor]:
        return [layer for cache in self.caches for layer in cache.window(0, batch)]

    def _through_borrowed(self, level: Level, feature: Tensor, target_cache: KVCache) -> Tensor:
        """Run the target's last N layers on the frontier: [B·w, E] -> [B·w, E]."""
        target = self.target
        return target.run_layers(
            feature.to(target.dtype),
            frontier_plan(target_cache, target.config.groups, level, level.frontier.inherited),
            target_cache,
            first_layer=target.config.num_layers - self.borrowed,
        )


@cache
def _no_state(batch: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Roots have no parents."""
    return torch.zeros(batch, 1, size, dtype=dtype, device=device)
