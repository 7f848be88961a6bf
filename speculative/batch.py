"""Attention plans of a step: where rows go in the cache and what they see."""

from __future__ import annotations

import torch
from torch import Tensor

from models.attention import AttentionPlan, additive
from models.kv_cache import KVCache
from speculative.tree import DraftTree

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


def verify_plan(cache: KVCache, lengths: list[int], tree: DraftTree) -> AttentionPlan:
    """The roots and draft nodes of slots 0 … B−1, whose caches hold ``lengths`` tokens.

    A root alone goes straight to its place in the text; a tree goes to the slot's scratch rows until its path is known.
    """
    device = cache.data.device
    batch, rows = len(lengths), tree.num_rows
    offsets = torch.tensor(lengths, device=device)
    slots = torch.arange(batch, device=device).unsqueeze(1) * cache.rows_per_slot
    if rows == 1:
        span = span_of(cache, max(lengths) + 1)
        mask = text_mask(cache, span, offsets.view(-1, 1, 1, 1))
        write = slots.squeeze(1) + cache.scratch + offsets
        return AttentionPlan(0, batch, 1, offsets, write, mask.shape[-1], mask)
    ancestors = tree.ancestors().to(device)
    positions = (offsets.unsqueeze(1) + ancestors.sum(-1) - 1).flatten()
    write = (slots + torch.arange(rows, device=device)).flatten()
    prefix = span_of(cache, max(lengths))
    mask = torch.full((batch, 1, rows, cache.scratch + prefix), float("-inf"), dtype=cache.data.dtype, device=device)
    mask[:, 0, :, :rows].masked_fill_(ancestors, 0.0)
    mask[..., cache.scratch :].masked_fill_(torch.arange(prefix, device=device) < offsets.view(-1, 1, 1, 1), 0.0)
    return AttentionPlan(0, batch, rows, positions, write, cache.scratch + prefix, mask)


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
