"""How rows see one another: additive masks, cached attention for serving, masked attention for training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from models import causal_attention
from models.cached_attention import cached_attention as attend_to_cache
from models.kv_cache import KVCache, KVWindow
from models.layers import Attend


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where a batch's rows are written in the cache and what each of them sees; built once a step, used by every layer.

    The batch covers ``batch`` consecutive slots from ``first_slot`` with ``rows`` rows each. ``write`` [batch·rows] are flat cache
    rows; ``mask`` is additive, [batch, 1, rows·groups, span], over the slot's first ``span`` cache rows, scratch rows included:
    the query heads of a KV head stand in line as rows of one product, and each row of the batch is repeated for its ``groups``.
    """

    first_slot: int
    batch: int
    rows: int
    positions: Tensor
    write: Tensor
    mask: Tensor

    @property
    def span(self) -> int:
        """Cache rows that are read of each slot."""
        return self.mask.shape[-1]


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Boolean ``allowed`` -> 0 where true, −inf elsewhere."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))


def cached_attention(cache: KVCache | KVWindow, layer: int, plan: AttentionPlan, num_heads: int) -> Attend:
    """Attention that writes the rows' keys and values into ``cache`` and reads all that the plan's mask lets them see."""
    head_dim, kv_heads = cache.head_dim, cache.num_kv_heads
    groups = num_heads // kv_heads

    def attend(queries: Tensor, kv: Tensor) -> Tensor:
        cache.write(layer, plan.write, kv)
        if isinstance(cache, KVWindow) and cache.tiles:
            return attend_to_cache(queries, cache.layers[layer], plan.mask, kv_heads)
        keys, values = cache.read(layer, plan.first_slot, plan.batch, plan.span)
        lined_up = queries.reshape(plan.batch, plan.rows * groups, kv_heads, head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(lined_up, keys, values, attn_mask=plan.mask)
        return out.transpose(1, 2).reshape(plan.batch * plan.rows, num_heads * head_dim)

    return attend


def masked_attention(batch: int, num_heads: int, num_kv_heads: int, mask: Tensor | None, *, causal: bool = False) -> Attend:
    """Attention among the rows themselves, without a cache.

    Rows are [batch·S]; ``mask`` is boolean [batch or 1, 1, S, S] (true: may see) or None for all (or, with ``causal``, the past).
    """

    def attend(queries: Tensor, kv: Tensor) -> Tensor:
        head_dim = queries.shape[-1] // num_heads
        rows, both = queries.view(batch, -1, num_heads, head_dim), kv.view(batch, -1, 2, num_kv_heads, head_dim)
        if causal and mask is None and causal_attention.suits(rows):
            return causal_attention.causal_attention(rows, both).flatten(2).flatten(0, 1)
        keys, values = both.unbind(2)
        return full_attention(rows, keys, values, mask, causal=causal).flatten(0, 1)

    return attend


def full_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, causal: bool = False) -> Tensor:
    """Queries [B, Q, h, d] (heads group-major) over keys and values [B, S, n_kv, d] -> [B, Q, h·d].

    ``mask`` is boolean, [B or 1, 1, Q, S].
    """
    groups = queries.shape[2] // keys.shape[2]
    if mask is None and not causal:
        # All see all: the query heads of a KV head may stand in line as further rows, and nothing is copied for them.
        rows = queries.reshape(queries.shape[0], -1, keys.shape[2], keys.shape[3]).transpose(1, 2)
        out = F.scaled_dot_product_attention(rows, keys.transpose(1, 2), values.transpose(1, 2))
        return out.transpose(1, 2).reshape(*queries.shape[:2], -1)
    # Group-major heads: tiling the KV heads lines head g·n_kv + k up with KV head k.
    keys, values = (x.repeat(1, 1, groups, 1).transpose(1, 2) for x in (keys, values))
    out = F.scaled_dot_product_attention(queries.transpose(1, 2), keys, values, attn_mask=mask, is_causal=causal)
    return out.transpose(1, 2).flatten(2)
