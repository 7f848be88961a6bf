"""Only some positions of a batch are asked for what comes next; only those need queries."""

from __future__ import annotations

import torch
from torch import Tensor

from models.attention import full_attention


class Padded:
    """Wanted ``rows`` [R] of a batch as [B, most]: sequences want different numbers, so all are filled up to the largest."""

    def __init__(self, wanted: Tensor) -> None:
        self.batch, self.length = wanted.shape
        self.rows = rows = wanted.flatten().nonzero().squeeze(1)
        self.most = max(1, int(wanted.sum(dim=1).max()))
        starts = torch.arange(self.batch, device=rows.device).unsqueeze(1) * self.most
        self.slots = (starts + wanted.cumsum(dim=1) - 1).flatten().index_select(0, rows)
        self.positions = self.fill(rows % self.length)

    def fill(self, x: Tensor) -> Tensor:
        """x [R, …] -> [B, most, …], zero where nothing is wanted."""
        filled = x.new_zeros(self.batch * self.most, *x.shape[1:]).index_copy(0, self.slots, x)
        return filled.view(self.batch, self.most, *x.shape[1:])

    def mask_rows(self, mask: Tensor) -> Tensor:
        """The wanted rows of a mask [B or 1, 1, S, S] -> [B, most, S]."""
        whole = mask.expand(self.batch, 1, self.length, self.length).squeeze(1)
        return whole.gather(1, self.positions.unsqueeze(2).expand(-1, -1, self.length))

    def attend(self, queries: Tensor, keys_values: Tensor, seen: Tensor) -> Tensor:
        """Queries [R, h, d] over keys and values [B, K, 2·n_kv·d] as far as ``seen`` [B, most, K] -> [R, h·d]."""
        keys, values = keys_values.unflatten(2, (2, -1, queries.shape[-1])).unbind(2)
        out = full_attention(self.fill(queries), keys, values, seen.unsqueeze(1))
        return out.flatten(0, 1).index_select(0, self.slots)
