"""The operator that chooses a sampled token where the CPU has what its operators need; see ``sampled_token.cpp``."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from models.tiles import has_operators, loaded

_VECTORS = 32


def suits(logits: Tensor) -> bool:
    """Whether it takes this row of logits [V]: the library has been loaded, and the row is whole vectors of float32."""
    return logits.dtype == torch.float32 and logits.is_cpu and logits.shape[-1] % _VECTORS == 0 and loaded() and has_operators()


@cache
def _operator() -> torch._ops.OpOverload:
    operator: torch._ops.OpOverload = torch.ops.moaserve.sampled_token.default
    return operator


def sampled_token(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, stream: int, position: int) -> int:
    """The token with the largest logit [V] after these settings, in this order, and the noise of ``stream`` at ``position``."""
    token: int = _operator()(logits.contiguous(), temperature, top_k, top_p, min_p, stream, position)
    return token
