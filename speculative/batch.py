"""Attention plans of draft trees: where their rows go in the cache and what they see."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import AttentionPlan, additive
from models.kv_cache import KVCache
from models.llama import CompiledGraph
from models.plans import counting, decode_plan, span_of
from models.tiles import TYPES, operator_class
from speculative.sequence import Sequence
from speculative.tree import DraftTree, ancestors


class TreePass(Protocol):
    """The target's pass over a step's trees, all in one."""

    def suits(self, batch: Many[Sequence], tree: DraftTree) -> bool:
        """Whether it is for these texts, in consecutive slots, and their trees."""

    def __call__(
        self, roots: list[int], tree: DraftTree, lengths: list[int], first_slot: int
    ) -> tuple[Tensor, Tensor | list[list[int]], Tensor | None]:
        """Trees of these roots [B], after texts of ``lengths`` [B] in slots from ``first_slot`` on.

        Logits [B, N+1, V], each row's best token [B, N+1], and what is tapped [B·(N+1), taps·E]; all hold until the next call.
        """


def in_scratch_rows(cache: KVCache, batch: Many[Sequence], tree: DraftTree) -> bool:
    """Whether all of these texts go on, and their trees have room where trees usually stand."""
    return not any(tree.straight) and tree.num_rows <= cache.scratch and not any(sequence.waits for sequence in batch)


def token_ids_of(roots: list[int], tree: DraftTree, device: torch.device) -> Tensor:
    """Roots and nodes [B, N+1]."""
    return torch.cat((torch.tensor(roots, device=device).unsqueeze(1), tree.tokens.to(device)), dim=1)


def verify_plan(
    cache: KVCache,
    groups: int,
    lengths: list[int],
    tree: DraftTree,
    compiled: Mapping[str, CompiledGraph] | None = None,
    first_slot: int = 0,
) -> AttentionPlan:
    """The roots and draft nodes of B slots from ``first_slot`` on, whose caches hold ``lengths`` tokens.

    A root alone goes straight to its place in the text; a tree goes to the slot's scratch rows until its path is known.
    Of what is ``compiled``, "layout" stands in for ``TreeLayout`` and "root_layout" for what roots alone take.
    """
    alone = tree.num_rows == 1
    layout = (compiled or {}).get("root_layout" if alone else "layout")
    if alone and layout is None:
        return decode_plan(cache, groups, lengths, first_slot)
    first_row = first_slot * cache.rows_per_slot
    if any(tree.straight):
        positions, write, mask = _straight_layout(cache, groups, lengths, tree)
        return AttentionPlan(first_slot, len(lengths), tree.num_rows, positions, write + first_row, mask)
    device = cache.data.device
    columns = counting(span_of(cache, max(lengths) + alone), device)
    inputs = [tree.parents.to(device), torch.tensor(lengths, device=device), columns]
    positions, write, mask = layout(inputs) if layout is not None else TreeLayout(cache, groups)(*inputs)
    write = write.flatten() + first_row if first_row else write.flatten()
    return AttentionPlan(first_slot, len(lengths), tree.num_rows, positions.flatten(), write, mask)


def _straight_layout(cache: KVCache, groups: int, lengths: list[int], tree: DraftTree) -> tuple[Tensor, Tensor, Tensor]:
    """Trees in scratch rows beside chains in their places, which see the text up to themselves."""
    device, rows, scratch = cache.data.device, tree.num_rows, cache.scratch
    seen = ancestors(tree.parents.to(device), rows)
    offsets = torch.tensor(lengths, device=device).unsqueeze(1)
    straight, sizes = (torch.tensor(column, device=device).unsqueeze(1) for column in (tree.straight, tree.sizes))
    slots, row = counting(len(lengths), device).unsqueeze(1), counting(rows, device)
    positions = offsets + seen.sum(-1) - 1
    places = torch.where(straight, cache.flat_rows(slots, positions), slots * cache.rows_per_slot + row)
    # Padding goes behind the text, where nothing is yet; a slot's last place is never taken, as its token ends the text.
    behind = cache.flat_rows(slots, (offsets + row).clamp(max=cache.length - 1))
    write = torch.where(row > sizes, behind, places)
    columns = counting(span_of(cache, max(lengths) + rows), device)
    ends = torch.where(straight, positions + 1, offsets).unsqueeze(-1)
    in_scratch = F.pad(seen, (0, max(0, scratch - rows)))[..., :scratch] & ~straight.unsqueeze(-1)
    allowed = torch.cat((in_scratch, columns < ends), dim=-1).repeat_interleave(groups, dim=1)
    return positions.flatten(), write.flatten(), additive(allowed.unsqueeze(1), cache.data.dtype)


class TreeLayout(nn.Module):
    """Where trees stand in a cache and what they see: a module, so that it can be compiled."""

    def __init__(self, cache: KVCache, groups: int) -> None:
        super().__init__()
        self.scratch, self.rows_per_slot, self.groups, self.dtype = cache.scratch, cache.rows_per_slot, groups, cache.data.dtype

    @property
    def settings(self) -> str:
        """All that it computes from, besides its inputs."""
        return f"{self.scratch} {self.rows_per_slot} {self.groups} {self.dtype}"

    def forward(self, parents: Tensor, offsets: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Positions [B, N+1], flat cache rows [B, N+1] and additive mask [B, 1, (N+1)·groups, scratch + S].

        ``parents`` [B, N] as in DraftTree; ``offsets`` [B] are the lengths of the texts before the trees, and ``columns`` [S] the
        positions 0, 1, … of those texts as far as the mask is to reach.
        """
        seen = ancestors(parents, self.scratch - 1)
        batch, rows, _ = seen.shape
        positions = offsets.unsqueeze(1) + seen.sum(-1) - 1
        slots = torch.arange(batch, device=parents.device).unsqueeze(1)
        write = slots * self.rows_per_slot + torch.arange(rows, device=parents.device)
        scratch_rows = F.pad(seen, (0, self.scratch - rows)).repeat_interleave(self.groups, dim=1)
        text = (columns < offsets.view(-1, 1, 1)).expand(-1, rows * self.groups, -1)
        return positions, write, additive(torch.cat((scratch_rows, text), dim=-1).unsqueeze(1), self.dtype)


def layout_suits(cache: KVCache) -> bool:
    """Whether ``layout_operator`` does what TreeLayout does for ``cache``."""
    return cache.data.dtype in TYPES and cache.data.device.type == "cpu"


def layout_operator(cache: KVCache, groups: int) -> Any:
    """An operator that runs as a graph in the place of TreeLayout and ``decode_plan``: see ``models/tree_layout.h``."""
    return operator_class("TreeLayout", cache.data.dtype)(cache.scratch, cache.rows_per_slot, groups)
