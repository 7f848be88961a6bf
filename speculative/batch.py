"""Attention plans of a step: where rows go in the cache and what they see."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention import AttentionPlan, additive
from models.kv_cache import KVCache
from models.llama import CompiledGraph
from speculative.tree import DraftTree, ancestors

_SPAN_STEP = 64


def span_of(cache: KVCache, length: int) -> int:
    """Token rows to read for texts of up to ``length`` tokens: a multiple of 64, so that cache views are reused for a while."""
    return min(-(-length // _SPAN_STEP) * _SPAN_STEP, cache.length)


def text_mask(cache: KVCache, span: int, last: Tensor) -> Tensor:
    """Additive mask [..., scratch + span]: no scratch row, and of the text all up to position ``last`` [..., 1]."""
    columns = torch.arange(-cache.scratch, span, device=last.device)
    return additive((columns >= 0) & (columns <= last), cache.data.dtype)


def prefill_plan(cache: KVCache, slot: int, start: int, end: int) -> AttentionPlan:
    """Tokens ``start`` … ``end`` of one slot's text, each seeing all up to itself."""
    device = cache.data.device
    positions = torch.arange(start, end, device=device)
    span = span_of(cache, end)
    mask = text_mask(cache, span, positions.view(1, 1, -1, 1))
    return AttentionPlan(slot, 1, end - start, positions, cache.flat_row(slot, 0) + positions, mask.shape[-1], mask)


def verify_plan(cache: KVCache, lengths: list[int], tree: DraftTree, layout: CompiledGraph | None = None) -> AttentionPlan:
    """The roots and draft nodes of slots 0 … B−1, whose caches hold ``lengths`` tokens.

    A root alone goes straight to its place in the text; a tree goes to the slot's scratch rows until its path is known.
    ``layout`` stands in for ``tree_layout`` where it is compiled.
    """
    device = cache.data.device
    batch, rows = len(lengths), tree.num_rows
    offsets = torch.tensor(lengths, device=device)
    if rows == 1:
        mask = text_mask(cache, span_of(cache, max(lengths) + 1), offsets.view(-1, 1, 1, 1))
        write = cache.flat_rows(torch.arange(batch, device=device), offsets)
        return AttentionPlan(0, batch, 1, offsets, write, mask.shape[-1], mask)
    columns = torch.arange(span_of(cache, max(lengths)), device=device)
    inputs = [tree.parents.to(device), offsets, columns]
    if layout is not None:
        positions, mask = layout(inputs)
    else:
        positions, mask = tree_layout(*inputs, scratch=cache.scratch, dtype=cache.data.dtype)
    write = torch.arange(batch, device=device).unsqueeze(1) * cache.rows_per_slot + torch.arange(rows, device=device)
    return AttentionPlan(0, batch, rows, positions.flatten(), write.flatten(), mask.shape[-1], mask)


def tree_layout(parents: Tensor, offsets: Tensor, columns: Tensor, *, scratch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Positions [B, N+1] and additive mask [B, 1, N+1, scratch + S] of trees behind texts of ``offsets`` [B] tokens.

    ``parents`` [B, N] as in DraftTree, ``columns`` [S] the text's positions 0, 1, … as far as the mask is to reach.
    """
    seen = ancestors(parents, scratch - 1)
    rows = seen.shape[1]
    positions = offsets.unsqueeze(1) + seen.sum(-1) - 1
    scratch_rows = F.pad(seen, (0, scratch - rows))
    text = (columns < offsets.view(-1, 1, 1)).expand(-1, rows, -1)
    return positions, additive(torch.cat((scratch_rows, text), dim=-1).unsqueeze(1), dtype)


def borrowed_plan(
    cache: KVCache, offsets: Tensor, longest: int, positions: Tensor, tree_mask: Tensor, first_row: int
) -> AttentionPlan:
    """Frontier nodes of draft trees in the target's own cache, for drafters that borrow its last layers.

    ``tree_mask`` [B, 1, w, scratch'] says which drafted rows each node sees; verified tokens come from the target's own rows.
    """
    device = cache.data.device
    batch, _, width, drafted = tree_mask.shape
    prefix = span_of(cache, longest)
    mask = torch.full((batch, 1, width, cache.scratch + prefix), float("-inf"), dtype=cache.data.dtype, device=device)
    mask[..., :drafted] = tree_mask
    mask[..., cache.scratch :].masked_fill_(torch.arange(prefix, device=device) < offsets.view(-1, 1, 1, 1), 0.0)
    slots = torch.arange(batch, device=device).unsqueeze(1) * cache.rows_per_slot
    write = (slots + torch.arange(first_row, first_row + width, device=device)).flatten()
    return AttentionPlan(0, batch, width, positions, write, cache.scratch + prefix, mask)
