"""Lists of small numbers as they stand in frames: little-endian, four bytes for a token id, two for a tree's row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_ROWS = 2**16 - 1
"""The largest row of a tree that two bytes can name."""

_TOKEN, _ROW = np.dtype("<u4"), np.dtype("<u2")


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as bytes; OverflowError for what is below 0 or above 2³² − 1."""
    return _packed(token_ids, _TOKEN)


def unpack_tokens(data: bytes) -> list[int]:
    """The inverse of ``pack_tokens``."""
    token_ids: list[int] = token_array(data).tolist()
    return token_ids


def pack_rows(rows: Sequence[int]) -> bytes:
    """Rows of a tree as bytes; OverflowError for what is below 0 or above 2¹⁶ − 1."""
    return _packed(rows, _ROW)


def unpack_rows(data: bytes) -> list[int]:
    """The inverse of ``pack_rows``."""
    rows: list[int] = row_array(data).tolist()
    return rows


def token_array(data: bytes) -> npt.NDArray[np.uint32]:
    """A view of packed token ids; ValueError where they end in the middle of one."""
    return np.frombuffer(data, _TOKEN)


def row_array(data: bytes) -> npt.NDArray[np.uint16]:
    """A view of packed rows; ValueError where they end in the middle of one."""
    return np.frombuffer(data, _ROW)


def _packed(numbers: Sequence[int], kind: np.dtype[Any]) -> bytes:
    array = np.array(numbers, dtype=np.int64)
    if len(array) and (array.min() < 0 or array.max() > np.iinfo(kind).max):
        raise OverflowError(f"numbers between 0 and {np.iinfo(kind).max} can be written, not {array.min()} to {array.max()}")
    return array.astype(kind).tobytes()
