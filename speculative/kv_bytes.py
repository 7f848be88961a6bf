"""A block of the prefix cache as bytes (safetensors), for other processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from speculative.errors import InvalidBlockError

_DRAFTED = "drafted"


@dataclass(frozen=True, slots=True)
class Contents:
    """Rows of a block, [L, tokens, row] for the target's cache and each of the drafter's; ``drafted``: the latter are complete."""

    rows: tuple[Tensor, ...]
    drafted: bool


def pack(contents: Contents) -> bytes:
    """As safetensors: the caches by number."""
    rows = {str(number): rows.contiguous() for number, rows in enumerate(contents.rows)}
    return save({**rows, _DRAFTED: torch.tensor([contents.drafted])})


def unpack(data: bytes) -> Contents:
    """What ``pack`` gave; raises InvalidBlockError for anything else."""
    try:
        tensors = load(data)
        drafted = bool(tensors.pop(_DRAFTED).all())
        return Contents(tuple(tensors[str(number)] for number in range(len(tensors))), drafted)
    except (SafetensorError, KeyError) as error:
        raise InvalidBlockError(f"not a block: {error}") from error
