"""The operator with which compiled decoders attend to a cache where the CPU multiplies tiles (AMX); see ``cached_attention.cpp``.

It is part of the library that ``graph_runner`` builds, and graphs call it by its C name: through PyTorch's dispatcher a call would
cost as much as the attention of a short text.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_suffix(".cpp")

_library = torch.library.Library("moaserve", "FRAGMENT")
_library.define("cached_attention(Tensor queries, Tensor kv, Tensor mask, int kv_heads) -> Tensor")


def _like_queries(queries: Tensor, kv: Tensor, mask: Tensor, kv_heads: int) -> Tensor:
    return torch.empty_like(queries)


torch.library.register_fake("moaserve::cached_attention", _like_queries, lib=_library)


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
    tiles = torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_amx_tile_supported()
    return tiles and dtype == torch.bfloat16 and head_dim % 16 == 0 and head_dim <= 256


def source_fingerprint() -> str:
    """Identifies the operator, for graphs that use it."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
