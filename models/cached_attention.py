"""The operator with which compiled decoders attend to a cache; see ``cached_attention.cpp``."""

from __future__ import annotations

import torch
from torch import Tensor

from models.tiles import LIBRARY, TYPES, has_operators

LIBRARY.define("cached_attention(Tensor queries, Tensor kv, Tensor mask, int kv_heads) -> Tensor")


def _like_queries(queries: Tensor, kv: Tensor, mask: Tensor, kv_heads: int) -> Tensor:
    return torch.empty_like(queries)


torch.library.register_fake("moaserve::cached_attention", _like_queries, lib=LIBRARY)


C_SHIMS = {
    torch.ops.moaserve.cached_attention.default: [
        "AOTITorchError aoti_torch_cpu_cached_attention("
        "AtenTensorHandle queries, AtenTensorHandle kv, AtenTensorHandle mask, int64_t kv_heads, AtenTensorHandle* out)"
    ]
}
"""How compiled graphs are to call it, for Inductor's ``aot_inductor.custom_ops_to_c_shims``."""


def cached_attention(queries: Tensor, kv: Tensor, mask: Tensor, kv_heads: int) -> Tensor:
    """Attend to a cache: queries [B·rows, h·d], group-major, -> the same shape.

    ``kv`` [B, slot_rows, 2·n_kv·d] holds the keys of all KV heads, then their values; ``mask`` [B, 1, rows·groups, span] is
    additive. A query that may see nothing gets zeros. ``graph_runner.load_runner`` must have been called.
    """
    out: Tensor = torch.ops.moaserve.cached_attention(queries, kv, mask, kv_heads)
    return out


def suits(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether this CPU has what the operator is for, and it takes heads of this size."""
    return has_operators() and dtype in TYPES and head_dim % 16 == 0 and head_dim <= 256
