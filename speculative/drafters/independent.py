"""Drafting with a small language model of the target's vocabulary, which knows nothing of the target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from models.attention import AttentionPlan, additive
from models.kv_cache import KVCache
from models.llama import Llama
from models.loader import optimize_for_inference
from models.plans import span_of
from models.tiled_decoder import tiled_decoder, tiled_head
from speculative.drafters.base import VerifiedTokens
from speculative.drafters.growth import Candidates, Frontier, Level, expand
from speculative.drafters.tree_drafter import TreeDrafter, frontier_plan, root_mask
from speculative.policy import DraftShape


class IndependentDrafter(TreeDrafter):
    """Any small model with the target's tokenizer can draft for it."""

    name = "independent"

    def __init__(self, model: Llama, num_slots: int, length: int, shape: DraftShape) -> None:
        self.model = model
        self.scratch = 1 + shape.depth * shape.breadth
        self.cache = model.new_cache(num_slots, self.scratch, length)
        super().__init__(model.device, [self.cache])
        self._tiled_head: Any = None

    @property
    def runs_compiled(self) -> bool:
        """Whether operators stand in for the model."""
        return self.model.compiled is not None

    def use_operators(self) -> None:
        """Let operators stand in for a model that they are for; ``graph_runner.load_runner`` must have been called."""
        self.model.compiled = tiled_decoder(self.model, released=self.model.config.num_layers)
        self._tiled_head = tiled_head(self.model)

    def pack(self) -> None:
        """Prepare the network's weights for inference."""
        optimize_for_inference(self.model)

    def extend(self, verified: VerifiedTokens, target_cache: KVCache) -> None:
        """Run the model on verified tokens."""
        model = self.model
        plan, order = _ragged_plan(self.cache, model.config.groups, verified.slots, verified.positions)
        token_ids = torch.zeros(plan.batch * plan.rows, dtype=torch.long, device=self.device)
        token_ids.index_copy_(0, order, verified.token_ids)
        # Keys and values are all that is wanted: of a single text the last layer need not work out more.
        model(token_ids, plan, self.cache, wanted=len(token_ids) if plan.batch == 1 else 0)

    def inherited(self, lengths: Tensor) -> Tensor:
        """The mask of the scratch row that is the root's own."""
        return root_mask(len(lengths), self.scratch, self.model.dtype, self.device)

    def grow(
        self, level: Level, known: Tensor | None, breadth: int, target_cache: KVCache | None
    ) -> tuple[None, Candidates, Frontier, Tensor]:
        """As in TreeDrafter."""
        model, frontier = self.model, level.frontier
        plan = frontier_plan(self.cache, model.config.groups, level, frontier.inherited)
        hidden = model(frontier.tokens.flatten(), plan, self.cache)
        logits = model.logits(hidden).float() if self._tiled_head is None else self._tiled_head.run([hidden])[0]
        return None, *expand(level, logits.unflatten(0, frontier.tokens.shape), None, breadth, frontier.inherited, masked=True)


def _ragged_plan(cache: KVCache, groups: int, slots: Tensor, positions: Tensor) -> tuple[AttentionPlan, Tensor]:
    """New tokens of some slots, each sequence's in order and in line, and the row [n] of each in the plan.

    Slots from the first to the last have as many rows as the one with the most; those to spare write into the slot's first scratch
    row, which is written anew before it is read.
    """
    device = slots.device
    first, last = int(slots.min()), int(slots.max())
    batch = last - first + 1
    counts = torch.bincount(slots - first, minlength=batch)
    rows = int(counts.max())
    starts = counts.cumsum(0) - counts
    order = (slots - first) * rows + torch.arange(len(slots), device=device) - starts.repeat_interleave(counts)
    where = torch.zeros(batch * rows, dtype=torch.long, device=device).index_copy_(0, order, positions)
    spare = torch.arange(first, last + 1, device=device).repeat_interleave(rows) * cache.rows_per_slot
    write = spare.index_copy_(0, order, cache.flat_rows(slots, positions))
    columns = torch.arange(-cache.scratch, span_of(cache, int(positions.max()) + 1), device=device)
    seen = (columns >= 0) & (columns <= where.view(batch, rows, 1).repeat_interleave(groups, dim=1).unsqueeze(1))
    return AttentionPlan(first, batch, rows, where, write, additive(seen, cache.data.dtype)), order
