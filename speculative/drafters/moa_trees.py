"""Tree drafting with a Mixture-of-Attentions drafter, batched over sequences, wherever memory comes from.

What drafting needs of memory and SA's keys and values are kept for verified tokens; tree nodes live in SA's scratch rows while a
tree grows.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from models.kv_cache import KVCache
from speculative.drafters.growth import Candidates, Frontier, Level
from speculative.drafters.moa_network import DraftNetwork
from speculative.drafters.tree_drafter import TreeDrafter, root_mask
from speculative.errors import EngineLoadError
from speculative.policy import DraftShape


class MoATreeDrafter(TreeDrafter):
    """Trees by a Mixture-of-Attentions drafter.

    Of prompts SA and CA read the last ``window`` tokens (None: all). ``memories``, for an entry alone, takes memory itself.
    """

    name = "moa"

    def __init__(
        self,
        network: DraftNetwork,
        num_slots: int,
        length: int,
        shape: DraftShape,
        window: int | None,
        memories: KVCache | None,
    ) -> None:
        self.network, self.window = network, window
        moa = network.moa
        config, block = moa.config, moa.block
        if block is not None and shape.depth > block.size:
            raise EngineLoadError(
                f"this drafter was trained for trees of {block.size} levels: lower --draft-depth ({shape.depth}) to that"
            )
        self.breadth, self.scratch = shape.breadth, 1 + shape.depth * shape.breadth if block is None else block.size
        device, dtype, head_dim = network.target.device, network.dtype, config.target.head_dim
        sa_cache = KVCache(1, num_slots, self.scratch, length, config.sa_num_kv_heads, head_dim, dtype=dtype, device=device)
        ca_cache = KVCache(1, num_slots, 0, length, config.ca_num_kv_heads, head_dim, dtype=dtype, device=device)
        moa.rotary.reserve(length + self.scratch, moa.sa.input_norm.weight)
        super().__init__(device, [sa_cache, ca_cache, *(() if memories is None else (memories,))], network.head)

    def inherited(self, lengths: Tensor) -> Tensor:
        """In a block no state; else the mask of the scratch row that is the root's own."""
        batch, dtype, moa = len(lengths), self.network.dtype, self.network.moa
        if moa.block is None:
            return root_mask(batch, self.scratch, dtype, self.device)
        return _no_state(batch, moa.config.target.hidden_size, dtype, self.device)

    def grow(
        self, level: Level, known: Tensor | None, breadth: int, target_cache: KVCache | None
    ) -> tuple[Tensor | None, Candidates, Frontier, Tensor]:
        """As in TreeDrafter; what ``DraftNetwork.block`` tells is known from the first level on."""
        if self.network.moa.block is not None and known is None:
            return self._open(level, breadth, target_cache)
        return known, *self._expand(level, known, breadth, target_cache)

    def through_borrowed(self, level: Level, feature: Tensor, target_cache: KVCache | None) -> Tensor:
        """What leaves CA -> what enters the head, [B·w, E]: the same, where no layers are borrowed."""
        return feature

    def _open(self, level: Level, breadth: int, target_cache: KVCache | None) -> tuple[Tensor, Candidates, Frontier, Tensor]:
        """The first level of a block: what it tells, then as ``_expand``."""
        roots = level.frontier.tokens
        if graph := self.compiled.get("block"):
            # It comes with a greedy level of the drafter's own breadth.
            out = graph([*level.tensors(), *self.windows(len(roots))])
            if level.sampling is None and breadth == self.breadth:
                return out[0], Candidates(*out[1:4]), Frontier(*out[4:8]), out[8]
            known = out[0]
        else:
            known = self.network.block(roots, level.text, self.caches)
        return known, *self._expand(level, known, breadth, target_cache)

    def _expand(
        self, level: Level, known: Tensor | None, breadth: int, target_cache: KVCache | None
    ) -> tuple[Candidates, Frontier, Tensor]:
        """All candidates, the next frontier and its reach; ``known`` is a block's."""
        sampling, shape = level.sampling, level.frontier.tokens.shape
        # A compiled level has its breadth built in.
        graph = self.compiled.get("level" if sampling is None else "sampled_level") if breadth == self.breadth else None
        if graph is not None:
            windows = self.windows(shape[0]) if known is None or self.network.moa.config.copies else []
            out = graph([*level.tensors(), *(sampling or ()), *([] if known is None else [known]), *windows])
            return Candidates(*out[:3]), Frontier(*out[3:7]), out[7]
        if known is not None:
            return self.network.expand(level, self.network.states(level, known, self.caches), breadth)
        feature = self.through_borrowed(level, self.network.feature(level, self.caches), target_cache)
        return self.network.expand(level, feature.unflatten(0, shape), breadth)


@cache
def _no_state(batch: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Roots have no parents."""
    return torch.zeros(batch, 1, size, dtype=dtype, device=device)
