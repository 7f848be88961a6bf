"""Storage of rows that outlive their slots, in blocks; which block holds what is the prefix cache's business."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from models.kv_cache import KVCache


class KVBlocks:
    """``num_blocks`` blocks of ``size`` tokens each, with rows of all ``caches``: a tensor [L, blocks, size, row] for each."""

    def __init__(self, caches: Sequence[KVCache], num_blocks: int, size: int) -> None:
        self._caches, self.num_blocks, self.size = tuple(caches), num_blocks, size
        # Empty: blocks are written before they are read, and on a CPU they take no memory until then.
        self._pools = [
            torch.empty(cache.num_layers, num_blocks, size, cache.data.shape[-1], dtype=cache.data.dtype, device=cache.data.device)
            for cache in self._caches
        ]

    @property
    def nbytes(self) -> int:
        """Bytes taken when all blocks are in use."""
        return sum(pool.nbytes for pool in self._pools)

    def store(self, slot: int, places: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy some of a slot's text, its ``places``-th stretches of ``size`` tokens, to ``blocks``."""
        for cache, pool in zip(self._caches, self._pools, strict=True):
            for block, place in zip(blocks, places, strict=True):  # one indexed copy takes longer
                first = cache.flat_row(slot, place * self.size)
                pool[:, block] = cache.data[:, first : first + self.size]

    def load(self, blocks: Sequence[int], slot: int) -> None:
        """Write ``blocks``, one after another, where a slot's text begins."""
        where = torch.tensor(blocks, device=self._pools[0].device)
        for cache, pool in zip(self._caches, self._pools, strict=True):
            first = cache.flat_row(slot, 0)
            rows = cache.data[:, first : first + len(blocks) * self.size].unflatten(1, (len(blocks), self.size))
            torch.index_select(pool, 1, where, out=rows)

    def read(self, blocks: Sequence[int]) -> list[Tensor]:
        """Copies of ``blocks`` in main memory, one tensor [blocks, L, size, row] for each cache."""
        where = torch.tensor(blocks, device=self._pools[0].device, dtype=torch.long)
        return [pool.index_select(1, where).transpose(0, 1).contiguous().cpu() for pool in self._pools]

    def write(self, blocks: Sequence[int], contents: Sequence[Tensor], places: Sequence[int]) -> None:
        """Fill ``blocks`` with those at ``places`` of what ``read`` gave."""
        for pool, rows in zip(self._pools, contents, strict=True):
            for block, place in zip(blocks, places, strict=True):  # one indexed copy takes twice as long
                pool[:, block] = rows[place]

    def empty_block(self) -> list[Tensor]:
        """A block's rows in main memory: [L, size, row] for each cache."""
        return [torch.zeros((len(pool), *pool.shape[2:]), dtype=pool.dtype) for pool in self._pools]
