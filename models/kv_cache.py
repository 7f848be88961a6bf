"""Storage of keys and values; who owns which slot is the scheduler's business."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class KVCache:
    """Keys and values of ``num_slots`` sequences in one preallocated tensor [L, slots·rows, 2·n_kv·d].

    Every slot starts with ``scratch`` rows for a draft tree, followed by ``length`` rows for tokens, so that tree rows stand at the
    same place in every slot however long its text is. A row holds the keys of all KV heads, then their values.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        scratch: int,
        length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_layers, self.num_slots, self.scratch, self.length = num_layers, num_slots, scratch, length
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.rows_per_slot = scratch + length
        self._allocate(dtype, device)

    def resize(self, num_slots: int) -> None:
        """Take memory for another number of slots; what the cache held is lost."""
        self.num_slots = num_slots
        self._allocate(self.data.dtype, self.data.device)

    def _allocate(self, dtype: torch.dtype, device: torch.device | str) -> None:
        shape = (2, self.num_kv_heads, self.head_dim)
        # Zeros, not empty: masked rows still enter products, and 0 · NaN is NaN.
        rows = self.num_slots * self.rows_per_slot
        self.data = _zeros((self.num_layers, rows, 2 * shape[1] * shape[2]), dtype, torch.device(device))
        self._slots = self.data.unflatten(1, (self.num_slots, self.rows_per_slot)).unflatten(3, shape)
        self._layers: tuple[Tensor, ...] = self.data.unbind(0)
        if self.data.device.type == "cpu":  # numpy has no bfloat16, and what is moved may be taken for any numbers
            self._numbers = self.data.view(torch.uint8).numpy()
        self._views: dict[tuple[int, int, int], list[tuple[Tensor, Tensor]]] = {}
        self._windows: dict[tuple[int, int], list[Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes taken."""
        return self.data.nbytes

    def flat_rows(self, slots: Tensor, positions: Tensor) -> Tensor:
        """The flat rows [n] of tokens at ``positions`` [n] of ``slots`` [n]."""
        rows: Tensor = torch.add(positions, slots, alpha=self.rows_per_slot)
        return rows.add_(self.scratch) if self.scratch else rows

    def flat_row(self, slot: int, position: int) -> int:
        """The flat row of the token at ``position`` of ``slot``; position −scratch is the slot's first scratch row."""
        return slot * self.rows_per_slot + self.scratch + position

    def write(self, layer: int, rows: Tensor, kv: Tensor) -> None:
        """Write kv [n, 2·n_kv·d] to the flat ``rows`` [n]."""
        self._layers[layer].index_copy_(0, rows, kv)

    def read(self, layer: int, first_slot: int, batch: int, span: int) -> tuple[Tensor, Tensor]:
        """Views of keys and values, each [batch, n_kv, span, d], over the first ``span`` rows of consecutive slots."""
        key = (first_slot, batch, span)
        views = self._views.get(key)
        if views is None:
            # Building views costs as much as a small product; a step's key repeats until its span grows.
            if len(self._views) > 256:
                self._views.clear()
            window = self._slots[:, first_slot : first_slot + batch, :span]
            views = [(layer_kv[:, :, 0].transpose(1, 2), layer_kv[:, :, 1].transpose(1, 2)) for layer_kv in window]
            self._views[key] = views
        return views[layer]

    def window(self, first_slot: int, batch: int) -> list[Tensor]:
        """Each layer's rows of consecutive slots as one dense tensor [batch, rows_per_slot, 2·n_kv·d]."""
        key = (first_slot, batch)
        window = self._windows.get(key)
        if window is None:
            rows = slice(first_slot * self.rows_per_slot, (first_slot + batch) * self.rows_per_slot)
            window = self._windows[key] = [layer[rows].view(batch, self.rows_per_slot, -1) for layer in self._layers]
        return window

    def move_rows(self, source: Tensor, destination: Tensor) -> None:
        """Copy flat rows ``source`` [n] to ``destination`` [n] in every layer."""
        self.data.index_copy_(1, destination, self.data.index_select(1, source))

    def move_listed_rows(self, source: Sequence[int], destination: Sequence[int]) -> None:
        """The same of a cache on a CPU, by numpy: PyTorch takes longer than the few rows of a step do."""
        self._numbers[:, destination] = self._numbers[:, source]

    def move_slot(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` tokens of one slot into another."""
        first, second = self.flat_row(source, 0), self.flat_row(destination, 0)
        self.data[:, second : second + length] = self.data[:, first : first + length]

    def gather(self, rows: Tensor) -> Tensor:
        """Flat rows [n] of all layers: [n, L, 2·n_kv·d]."""
        return self.data.index_select(1, rows).transpose(0, 1)

    def new_pool(self, num_blocks: int, size: int) -> BlockPool:
        """Room for ``num_blocks`` blocks of ``size`` tokens' rows that outlive their slots."""
        return BlockPool(self, num_blocks, size)


_LINE = 64
"""Bytes of a cache line, with which what vectors read had better begin."""


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, on a CPU of memory that the system does not hand out before it is written: PyTorch writes all of it at once.

    Raises MemoryError, or as PyTorch does, where there is not as much.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    whole = torch.from_numpy(np.zeros(size + _LINE, dtype=np.uint8))
    start = -whole.data_ptr() % _LINE
    return whole[start : start + size].view(dtype).view(shape)


class BlockPool:
    """Blocks of rows of one ``cache``: a tensor [L, blocks, size, row]."""

    def __init__(self, cache: KVCache, num_blocks: int, size: int) -> None:
        self._cache, self.size = cache, size
        # Empty: blocks are written before they are read, and on a CPU they take no memory until then.
        data = cache.data
        self._data = torch.empty(cache.num_layers, num_blocks, size, data.shape[-1], dtype=data.dtype, device=data.device)

    @property
    def nbytes(self) -> int:
        """Bytes taken when all blocks are in use."""
        return self._data.nbytes

    def store(self, slot: int, places: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy some of a slot's text, its ``places``-th stretches of ``size`` tokens, to ``blocks``."""
        cache = self._cache
        for block, place in zip(blocks, places, strict=True):  # one indexed copy takes longer
            first = cache.flat_row(slot, place * self.size)
            self._data[:, block] = cache.data[:, first : first + self.size]

    def load(self, blocks: Sequence[int], slot: int) -> None:
        """Write ``blocks``, one after another, where a slot's text begins."""
        first = self._cache.flat_row(slot, 0)
        rows = self._cache.data[:, first : first + len(blocks) * self.size].unflatten(1, (len(blocks), self.size))
        torch.index_select(self._data, 1, torch.tensor(blocks, device=self._data.device), out=rows)

    def read(self, blocks: Sequence[int]) -> Tensor:
        """A copy of ``blocks`` [blocks, L, size, row]."""
        where = torch.tensor(blocks, device=self._data.device, dtype=torch.long)
        return self._data.index_select(1, where).transpose(0, 1).contiguous()

    def write(self, blocks: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Fill ``blocks`` with ``rows``, each [L, size, row]."""
        for block, content in zip(blocks, rows, strict=True):  # one indexed copy takes twice as long
            self._data[:, block] = content

    def empty_block(self) -> Tensor:
        """A block's rows in main memory: [L, size, row]."""
        return torch.zeros((len(self._data), *self._data.shape[2:]), dtype=self._data.dtype)


class KVWindow:
    """The slots of a batch, given as one tensor a layer (``KVCache.window``): what a compiled graph knows of a cache.

    With ``tiles`` attention reads it through ``models.cached_attention``.
    """

    def __init__(self, layers: list[Tensor], num_kv_heads: int, head_dim: int, *, tiles: bool = False) -> None:
        self.layers, self.num_kv_heads, self.head_dim, self.tiles = layers, num_kv_heads, head_dim, tiles
        self.rows_per_slot = layers[0].shape[1]

    def gather(self, rows: Tensor) -> Tensor:
        """As ``KVCache.gather``."""
        return torch.stack([layer.view(-1, layer.shape[-1]).index_select(0, rows) for layer in self.layers], dim=1)

    def write(self, layer: int, rows: Tensor, kv: Tensor) -> None:
        """Write kv [n, 2·n_kv·d] to the ``rows`` [n], counted from the window's first."""
        self.layers[layer].view(-1, kv.shape[-1]).index_copy_(0, rows, kv)

    def read(self, layer: int, first_slot: int, batch: int, span: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [batch, n_kv, span, d]; the window is the batch, so ``first_slot`` is 0."""
        assert first_slot == 0
        kv = self.layers[layer][:, :span].unflatten(2, (2, self.num_kv_heads, self.head_dim))
        return kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)


def heads_of(rows: Tensor, heads: slice, num_kv_heads: int, head_dim: int) -> Tensor:
    """Rows [..., 2·n_kv·d] cut to the keys and values of some of their heads."""
    out: Tensor = rows.unflatten(-1, (2, num_kv_heads, head_dim))[..., heads, :].flatten(-3)
    return out


def join_heads(parts: Sequence[Tensor], head_dim: int) -> Tensor:
    """Rows of some heads each [..., 2·n·d] -> rows of them all, as a cache has them."""
    return torch.cat([part.unflatten(-1, (2, -1, head_dim)) for part in parts], dim=-2).flatten(-3)


def lsa_layout(kv: Tensor, num_kv_heads: int, head_dim: int) -> Tensor:
    """[..., (k0 k1 … v0 v1 …)] -> [..., (k0 v0 k1 v1 …)]."""
    out: Tensor = kv.unflatten(-1, (2, num_kv_heads, head_dim)).transpose(-3, -2).flatten(-3)
    return out
