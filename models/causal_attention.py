"""The operators with which targets are trained where the CPU multiplies tiles; see ``causal_attention.cpp``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from models.tiles import LIBRARY, has_tiles, loaded

LIBRARY.define("causal_attention(Tensor queries, Tensor kv) -> (Tensor, Tensor)")
LIBRARY.define("causal_attention_backward(Tensor grad, Tensor queries, Tensor kv, Tensor out, Tensor logsum) -> (Tensor, Tensor)")


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, kv: Tensor) -> Tensor:
        out: Tensor
        out, logsum = torch.ops.moaserve.causal_attention(queries, kv)
        ctx.save_for_backward(queries, kv, out, logsum)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        grads: tuple[Tensor, Tensor] = torch.ops.moaserve.causal_attention_backward(grad, *ctx.saved_tensors)
        return grads


def causal_attention(queries: Tensor, kv: Tensor) -> Tensor:
    """Attend to oneself and what is before: queries [B, S, h, d], group-major, -> the same shape, in bfloat16, with gradients.

    ``kv`` [B, S, 2, n_kv, d] holds keys, then values. ``suits`` says whether it can.
    """
    inputs = (x.to(torch.bfloat16).contiguous() for x in (queries, kv))
    out: Tensor = _CausalAttention.apply(*inputs)  # type: ignore[no-untyped-call]  # torch's own has no types
    return out


def suits(queries: Tensor) -> bool:
    """Whether the operators take such queries, by themselves or under autocast, and their library has been loaded.

    Training loads it where it may compile; whoever serves has graphs instead, which attend to caches.
    """
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    return (
        queries.device.type == "cpu"
        and (autocast or queries.dtype == torch.bfloat16)
        and queries.shape[-1] % 16 == 0
        and has_tiles()
        and loaded()
    )
