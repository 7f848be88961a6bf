"""Attention plans of text: prompts in chunks, and one new token for each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from models.attention import AttentionPlan, additive
from models.kv_cache import KVCache

_SPAN_STEP = 64


def span_of(cache: KVCache, length: int) -> int:
    """Token rows to read for texts of up to ``length`` tokens: a multiple of 64, so that cache views are reused for a while."""
    return min(-(-length // _SPAN_STEP) * _SPAN_STEP, cache.length)


@cache
def counting(count: int, device: torch.device) -> Tensor:
    """0, 1, … [count], made once for each count: creating a tensor costs as much as computing with it."""
    return torch.arange(count, device=device)


def prefill_plan(cache: KVCache, groups: int, slot: int, start: int, end: int) -> AttentionPlan:
    """Tokens ``start`` … ``end`` of one slot's text, each seeing all up to itself, for ``groups`` query heads a KV head."""
    positions = torch.arange(start, end, device=cache.data.device)
    mask = _text_mask(cache, span_of(cache, end), positions.repeat_interleave(groups).view(1, 1, -1, 1))
    return AttentionPlan(slot, 1, end - start, positions, cache.flat_row(slot, 0) + positions, mask)


def decode_plan(cache: KVCache, groups: int, lengths: Sequence[int], first_slot: int = 0) -> AttentionPlan:
    """The newest tokens of B slots from ``first_slot`` on, which hold ``lengths`` tokens, each going straight to its place."""
    batch, device = len(lengths), cache.data.device
    offsets = torch.tensor(lengths, device=device)
    mask = _text_mask(cache, span_of(cache, max(lengths) + 1), offsets.view(-1, 1, 1, 1).expand(-1, -1, groups, -1))
    slots = counting(first_slot + batch, device)[first_slot:]
    return AttentionPlan(first_slot, batch, 1, offsets, cache.flat_rows(slots, offsets), mask)


def _text_mask(cache: KVCache, span: int, last: Tensor) -> Tensor:
    """Additive mask [..., scratch + span]: no scratch row, and of the text all up to position ``last`` [..., 1]."""
    columns = torch.arange(-cache.scratch, span, device=last.device)
    return additive((columns >= 0) & (columns <= last), cache.data.dtype)
