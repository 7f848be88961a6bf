"""What the process that leads tells those that compute with it: which function is called, with which numbers and tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_ALIGNED = 8
"""Bytes to whose multiples tensors are padded, so that each can be read where it lies."""


class Orders(Protocol):
    """Tells the other ranks to do what this one is about to do."""

    size: int

    def order(
        self, name: str, *arguments: object, tensors: Sequence[Tensor] = (), confirmed: bool = False
    ) -> AbstractContextManager[None]:
        """Have every other rank call ``name`` of its ``Follower`` while this one does its own part inside of the context.

        ``confirmed``: wait at its end until all have done so. Raises what ends an engine where one of them, or this one, cannot.
        """


@dataclass(frozen=True, slots=True)
class TensorKind:
    """A tensor's shape and type."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Bytes that it takes among others."""
        return -(-self.nbytes // _ALIGNED) * _ALIGNED


def kinds(tensors: Sequence[Tensor]) -> list[TensorKind]:
    """Their shapes and types."""
    return [TensorKind(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Their bytes, one after another [n]."""
    parts: list[Tensor] = []
    for tensor, kind in zip(tensors, kinds(tensors), strict=True):
        parts.append(tensor.contiguous().view(-1).view(torch.uint8))
        if kind.room > kind.nbytes:
            parts.append(parts[-1].new_zeros(kind.room - kind.nbytes))
    return torch.cat(parts)


def unpacked(data: Tensor, of: Sequence[TensorKind]) -> list[Tensor]:
    """The inverse of ``packed``: views of ``data``."""
    tensors, begin = [], 0
    for kind in of:
        tensors.append(data[begin : begin + kind.nbytes].view(kind.dtype).view(kind.shape))
        begin += kind.room
    return tensors


def gathered(part: Tensor) -> list[Tensor]:
    """On rank 0 what all ranks give, in their order; on others nothing."""
    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    dist.gather(part, parts, dst=0)
    return parts or []
