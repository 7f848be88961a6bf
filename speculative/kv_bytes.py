"""Blocks of the prefix cache as bytes (safetensors), for other processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from safetensors.torch import save
from torch import Tensor

from speculative.errors import InvalidBlockError

_DRAFTED = "drafted"


@dataclass(frozen=True, slots=True)
class Contents:
    """What n blocks hold.

    ``rows`` are [n, L, tokens, row] for the target's cache and each of the drafter's; ``drafted``: where the latter are complete.
    """

    rows: tuple[Tensor, ...]
    drafted: tuple[bool, ...]


class BlockFormat:
    """The bytes of blocks whose ``rows``, one tensor [L, tokens, row] for each cache, have these shapes and types.

    Each block is a safetensors file. As all have the same shapes they begin with the same header; so reading them means to
    compare that and to copy what follows, in a tenth of the time that parsing each would take.
    """

    def __init__(self, rows: Sequence[Tensor]) -> None:
        self._rows = tuple(rows)
        example = _save(rows, drafted=True)
        begin = 8 + int.from_bytes(example[:8], "little")
        entries = json.loads(example[8:begin])
        self._size, self._header = len(example), example[:begin]
        self._places = [self._place(entries, begin, str(number)) for number in range(len(rows))]
        self._drafted = self._place(entries, begin, _DRAFTED).start

    @staticmethod
    def _place(entries: dict[str, dict[str, list[int]]], begin: int, name: str) -> slice:
        first, last = entries[name]["data_offsets"]
        return slice(begin + first, begin + last)

    def pack(self, contents: Contents) -> list[bytes]:
        """Each block by itself."""
        each = zip(*(rows.unbind(0) for rows in contents.rows), strict=True)
        return [_save(rows, drafted) for rows, drafted in zip(each, contents.drafted, strict=True)]

    def unpack(self, blocks: Sequence[bytes]) -> Contents:
        """What ``pack`` gave here or elsewhere; raises InvalidBlockError for anything else."""
        if any(len(block) != self._size or not block.startswith(self._header) for block in blocks):
            raise InvalidBlockError("these blocks are of another model, drafter or format")
        views = [memoryview(block) for block in blocks]
        rows = [
            torch.frombuffer(bytearray().join(view[place] for view in views), dtype=like.dtype).view(len(blocks), *like.shape)
            for place, like in zip(self._places, self._rows, strict=True)
        ]
        return Contents(tuple(rows), tuple(bool(block[self._drafted]) for block in blocks))


def _save(rows: Sequence[Tensor], drafted: bool) -> bytes:
    named = {str(number): each.contiguous() for number, each in enumerate(rows)}
    return save({**named, _DRAFTED: torch.tensor([drafted])})
