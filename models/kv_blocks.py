"""Storage of rows that outlive their slots, in blocks; which block holds what is the prefix cache's business."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from models.kv_cache import KVCache


class KVBlocks:
    """``num_blocks`` blocks of ``size`` tokens each, with rows of all ``caches``."""

    def __init__(self, caches: Sequence[KVCache], num_blocks: int, size: int) -> None:
        self._pools = [cache.new_pool(num_blocks, size) for cache in caches]

    @property
    def nbytes(self) -> int:
        """Bytes taken when all blocks are in use."""
        return sum(pool.nbytes for pool in self._pools)

    def store(self, slot: int, places: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy some of a slot's text, its ``places``-th stretches of ``size`` tokens, to ``blocks``."""
        for pool in self._pools:
            pool.store(slot, places, blocks)

    def load(self, blocks: Sequence[int], slot: int) -> None:
        """Write ``blocks``, one after another, where a slot's text begins."""
        for pool in self._pools:
            pool.load(blocks, slot)

    def read(self, blocks: Sequence[int]) -> list[Tensor]:
        """Copies of ``blocks`` in main memory, one tensor [blocks, L, size, row] for each cache."""
        return [pool.read(blocks).cpu() for pool in self._pools]

    def write(self, blocks: Sequence[int], contents: Sequence[Tensor], places: Sequence[int]) -> None:
        """Fill ``blocks`` with those at ``places`` of what ``read`` gave."""
        for pool, rows in zip(self._pools, contents, strict=True):
            pool.write(blocks, [rows[place] for place in places])

    def empty_block(self) -> list[Tensor]:
        """A block's rows in main memory: [L, size, row] for each cache."""
        return [pool.empty_block() for pool in self._pools]
