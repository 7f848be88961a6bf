"""A block's levels copy: each asks memory where its token stood before, and is told what followed there.

A block's attention does not know the drafted tokens, so beyond the root it cannot look for them. This head does, and at the root
too, where it need not share its way with all else: a few queries, made of a level's token and the one before it alone, over the
keys and values of CA's first KV head. What they find joins the level's state. There is no MLP, and what a token contributes to its
queries can be worked out ahead.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.layers import Linear, RMSNorm, Rope, rotate


class CopyingHead(nn.Module):
    """Two projections [E, h·d] and one back, for ``num_heads`` heads: as many as share CA's first KV head."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.token_norm = RMSNorm(hidden_size, eps)
        self.from_token = Linear(hidden_size, num_heads * head_dim)
        self.from_previous = Linear(hidden_size, num_heads * head_dim)
        self.output = Linear(num_heads * head_dim, hidden_size)

    def queries(self, embeddings: Tensor, previous: Tensor, rope: Rope) -> Tensor:
        """Drafted tokens' embeddings, and those ``previous`` to them, [n, E] -> rotated queries [n, h, d]."""
        asked: Tensor = self.from_token(self.token_norm(embeddings)) + self.from_previous(self.token_norm(previous))
        return rotate(asked.unflatten(-1, (self.num_heads, self.head_dim)), rope)


def first_head(keys_values: Tensor, num_kv_heads: int) -> Tensor:
    """CA's keys and values [..., 2·n_kv·d] -> those of its first KV head [..., 2·d]."""
    first = keys_values.unflatten(-1, (2, num_kv_heads, -1)).select(-2, 0)
    return torch.cat(first.unbind(-2), dim=-1)
