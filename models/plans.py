"""Attention plans of text: prompts in chunks, and one new token for each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from models.attention import AttentionPlan, additive
from models.kv_cache import KVCache
from models.llama import CompiledGraph

_SPAN_STEP = 64


def span_of(cache: KVCache, length: int) -> int:
    """Token rows to read for texts of up to ``length`` tokens: a multiple of 64, so that cache views are reused for a while."""
    return min(-(-length // _SPAN_STEP) * _SPAN_STEP, cache.length)


def recorded_span(cache: KVCache, length: int) -> int:
    """The same with steps that grow with the length, to a quarter more at most: so few spans are recorded."""
    step = max(_SPAN_STEP, 1 << max(0, length.bit_length() - 3))
    return min(-(-length // step) * step, cache.length)


@cache
def counting(count: int, device: torch.device) -> Tensor:
    """0, 1, … [count], made once for each count: creating a tensor costs as much as computing with it."""
    return torch.arange(count, device=device)


def prefill_plan(
    cache: KVCache, groups: int, slot: int, start: int, end: int, root_layout: CompiledGraph | None = None
) -> AttentionPlan:
    """Tokens ``start`` … ``end`` of one slot's text, each seeing all up to itself, for ``groups`` query heads a KV head.

    ``root_layout`` may work out what they see: each sees what the root of a text as long as it is far would.
    """
    positions, span = torch.arange(start, end, device=cache.data.device), span_of(cache, end)
    if root_layout is None:
        mask = _text_mask(cache, span, positions.view(1, 1, -1, 1)).repeat_interleave(groups, dim=2)
    else:
        *_, seen = root_layout([positions.new_empty(len(positions), 0), positions, counting(span, positions.device)])
        mask = seen.view(1, 1, -1, seen.shape[-1])
    return AttentionPlan(slot, 1, end - start, positions, cache.flat_row(slot, 0) + positions, mask)


def decode_plan(cache: KVCache, groups: int, lengths: Sequence[int], first_slot: int = 0) -> AttentionPlan:
    """The newest tokens of B slots from ``first_slot`` on, which hold ``lengths`` tokens, each going straight to its place."""
    offsets = torch.tensor(lengths, device=cache.data.device)
    return decode_plan_within(cache, groups, offsets, span_of(cache, max(lengths) + 1), first_slot)


def decode_plan_within(cache: KVCache, groups: int, lengths: Tensor, span: int, first_slot: int = 0) -> AttentionPlan:
    """The same for ``lengths`` [B] that are below ``span``."""
    mask = _text_mask(cache, span, lengths.view(-1, 1, 1, 1).expand(-1, -1, groups, -1))
    slots = counting(first_slot + len(lengths), lengths.device)[first_slot:]
    return AttentionPlan(first_slot, len(lengths), 1, lengths, cache.flat_rows(slots, lengths), mask)


def _text_mask(cache: KVCache, span: int, last: Tensor) -> Tensor:
    """Additive mask [..., scratch + span]: no scratch row, and of the text all up to position ``last`` [..., 1]."""
    columns = torch.arange(-cache.scratch, span, device=last.device)
    return additive((columns >= 0) & (columns <= last), cache.data.dtype)
