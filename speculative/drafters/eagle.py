"""Drafting with EAGLE-2 and EAGLE-3."""

from __future__ import annotations

import torch
from torch import Tensor

from models.attention import cached_attention
from models.eagle import Eagle
from models.kv_cache import KVCache
from models.loader import optimize_for_inference
from speculative.drafters.base import TargetEnds, VerifiedTokens
from speculative.drafters.draft_head import DraftHead
from speculative.drafters.growth import Candidates, Frontier, Level, expand
from speculative.drafters.tree_drafter import TreeDrafter, frontier_plan, root_mask
from speculative.policy import DraftShape


class EagleDrafter(TreeDrafter):
    """A node's feature is the drafter's own guess, and what its children read.

    Of prompts it reads the last ``window`` tokens, the first of them as if it were the text's.

    A frontier inherits, beside one another, the mask of the scratch rows that a node sees and its parent's feature.
    """

    name = "eagle"

    def __init__(
        self, eagle: Eagle, target: TargetEnds, num_slots: int, length: int, shape: DraftShape, window: int | None = None
    ) -> None:
        config, device = eagle.config, target.device
        self.eagle, self.target, self.taps = eagle, target, config.taps
        self.head = DraftHead(target, eagle.draft_vocabulary)
        self.dtype = eagle.layer.qkv.weight.dtype
        self.scratch = 1 + shape.depth * shape.breadth
        heads, head_dim = config.num_kv_heads, config.target.head_dim
        self.cache = KVCache(1, num_slots, self.scratch, length, heads, head_dim, dtype=self.dtype, device=device)
        self.features = KVCache(1, num_slots, 0, length, 1, config.target.hidden_size // 2, dtype=self.dtype, device=device)
        eagle.rotary.reserve(length + self.scratch, eagle.layer.qkv.weight)
        super().__init__(device, [self.cache, self.features], self.head)
        self.window = self.sent_window = window

    def pack(self) -> None:
        """Prepare the network's weights for inference."""
        optimize_for_inference(self.eagle)
        self.head.pack()

    def extend(self, verified: VerifiedTokens, target_cache: KVCache) -> None:
        """The layer's keys and values of verified tokens, from true features."""
        assert verified.tapped is not None
        self.remember(verified, self.eagle.known(verified.tapped.to(self.dtype)))

    def remember(self, verified: VerifiedTokens, features: Tensor) -> None:
        """The same of tokens whose ``features`` [n, E] are known."""
        eagle, slots, positions = self.eagle, verified.slots, verified.positions
        self.features.write(0, self.features.flat_rows(slots, positions), features)
        inputs = eagle.inputs(self._embed(verified.token_ids), self._features_before(slots, positions, verified.begin))
        self.cache.write(0, self.cache.flat_rows(slots, positions), eagle.keys_values(inputs, eagle.rotary(positions)))

    def memory(self, slot: int, first: int, end: int) -> tuple[Tensor, None]:
        """Features [n, E] of positions ``first`` … ``end``: all that drafting elsewhere needs to know of the target's."""
        return self.features.data[0, self.features.flat_row(slot, first) : self.features.flat_row(slot, end)], None

    def inherited(self, lengths: Tensor) -> Tensor:
        """The root's own scratch row, and the feature of the token before it."""
        slots = torch.arange(len(lengths), device=self.device)
        mask = root_mask(len(lengths), self.scratch, self.dtype, self.device)
        return torch.cat((mask, self._features_before(slots, lengths).unsqueeze(1)), dim=-1)

    def grow(
        self, level: Level, known: Tensor | None, breadth: int, target_cache: KVCache | None
    ) -> tuple[None, Candidates, Frontier, Tensor]:
        """As in TreeDrafter."""
        eagle, frontier = self.eagle, level.frontier
        mask, parents = frontier.inherited.split((self.scratch, eagle.config.target.hidden_size), dim=-1)
        plan = frontier_plan(self.cache, eagle.layer.num_heads // eagle.layer.num_kv_heads, level, mask)
        inputs = eagle.inputs(self._embed(frontier.tokens.flatten()), parents.flatten(0, 1))
        attend = cached_attention(self.cache, 0, plan, eagle.layer.num_heads)
        features = eagle.layer(inputs, eagle.rotary(plan.positions), attend)
        logits = self.head(eagle.entering(features).unflatten(0, frontier.tokens.shape), level.text)
        handed_on = torch.cat((mask, features.unflatten(0, frontier.tokens.shape)), dim=-1)
        return None, *expand(level, logits, eagle.draft_vocabulary, breadth, handed_on, masked=True)

    def _features_before(self, slots: Tensor, positions: Tensor, begin: int = 0) -> Tensor:
        """Features [n, E] of the tokens before ``positions`` [n]: none, so zeros, before the first, which is at ``begin``."""
        rows = self.features.flat_rows(slots, (positions - 1).clamp(min=0))
        return self.features.gather(rows)[:, 0].masked_fill((positions == begin).unsqueeze(1), 0.0)

    def _embed(self, token_ids: Tensor) -> Tensor:
        return self.target.embed(token_ids).to(self.dtype)
