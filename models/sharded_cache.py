"""The cache of a sharded target as rank 0 has it: its own KV heads, and orders to the others for theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from models.kv_cache import BlockPool, KVCache, heads_of, join_heads
from models.orders import Orders, gathered


class LeadingCache(KVCache):
    """Keys and values of rank 0's heads; what moves them moves those of all ranks, and what leaves it is of all heads."""

    def __init__(self, orders: Orders, *sizes: int, **kind: Any) -> None:
        self.orders = orders
        super().__init__(*sizes, **kind)

    def resize(self, num_slots: int) -> None:
        """As in KVCache."""
        with self.orders.order("resize", num_slots, confirmed=True):
            super().resize(num_slots)

    def move_rows(self, source: Tensor, destination: Tensor) -> None:
        """As in KVCache."""
        with self.orders.order("move_rows", tensors=(source, destination)):
            super().move_rows(source, destination)

    def move_listed_rows(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """As in KVCache."""
        with self.orders.order("move_listed_rows", source, destination):
            super().move_listed_rows(source, destination)

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """As in KVCache."""
        with self.orders.order("move_slot", source, destination, length):
            super().move_slot(source, destination, length)

    def gather(self, rows: Tensor) -> Tensor:
        """As in KVCache, with the heads of all ranks in their order."""
        with self.orders.order("gather", tensors=(rows,)):
            return join_heads(gathered(super().gather(rows)), self.head_dim)

    def new_pool(self, num_blocks: int, size: int) -> BlockPool:
        """As in KVCache."""
        with self.orders.order("new_pool", num_blocks, size, confirmed=True):
            return LeadingPool(self, num_blocks, size)


class LeadingPool(BlockPool):
    """Blocks with rank 0's heads here and the others' there; read and written they have all, as those of one process do."""

    def __init__(self, cache: LeadingCache, num_blocks: int, size: int) -> None:
        super().__init__(cache, num_blocks, size)
        self._orders, self._heads, self._head_dim = cache.orders, cache.num_kv_heads, cache.head_dim

    def store(self, slot: int, places: Sequence[int], blocks: Sequence[int]) -> None:
        """As in BlockPool."""
        with self._orders.order("store", slot, tuple(places), tuple(blocks)):
            super().store(slot, places, blocks)

    def load(self, blocks: Sequence[int], slot: int) -> None:
        """As in BlockPool."""
        with self._orders.order("load", tuple(blocks), slot):
            super().load(blocks, slot)

    def read(self, blocks: Sequence[int]) -> Tensor:
        """As in BlockPool."""
        with self._orders.order("read", tuple(blocks)):
            return join_heads(gathered(super().read(blocks)), self._head_dim)

    def write(self, blocks: Sequence[int], rows: Sequence[Tensor]) -> None:
        """As in BlockPool."""
        whole = torch.stack(list(rows)).to(self._data.device)
        with self._orders.order("write", tuple(blocks), tensors=(whole,)):
            super().write(blocks, heads_of(whole, slice(self._heads), self._heads * self._orders.size, self._head_dim).unbind())

    def empty_block(self) -> Tensor:
        """As in BlockPool."""
        return super().empty_block().repeat(1, 1, self._orders.size)
