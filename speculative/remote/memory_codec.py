"""What a server sends of verified tokens instead of its key-value cache, as bytes.

Cross-attention needs of each token its rotated keys and its values, a row of 2·n_kv·d numbers as in the drafter's cache
(`models.kv_cache`); a drafter with an entry needs besides the memory [E] of the last token, and of no other. Rows are quantized
symmetrically, each head's keys and each head's values with a scale of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from models.config import DecoderConfig, MoAConfig
from speculative.config import MEMORY_FORMATS, MemoryFormat
from speculative.errors import InvalidMemoryError

_SCALE_BYTES = 2
_LARGEST_SCALE = torch.finfo(torch.float16).max
_LEVELS = {"int8": 127, "int4": 7}
"""The largest number that is written; its negative is the smallest, so the lowest code of each type is never used."""


@dataclass(frozen=True, slots=True)
class RowCodec:
    """Rows of ``groups`` times ``size`` numbers as bytes.

    A row of int8 or int4 is its groups' scales (float16), then its numbers in their order, each a multiple of its group's scale: a
    signed byte, or four bits of two's complement, the first of two numbers in a byte's lower half. A row of bfloat16 has no scales.
    All little-endian.
    """

    format: MemoryFormat
    groups: int
    size: int

    def __post_init__(self) -> None:
        """Refuse formats that nobody knows and rows of nothing."""
        if self.format not in MEMORY_FORMATS:
            raise InvalidMemoryError(f"memory format {self.format!r} is not known; use one of {', '.join(MEMORY_FORMATS)}")
        if self.groups < 1 or self.size < 1:
            raise InvalidMemoryError(f"a row needs at least one number, not {self.groups} groups of {self.size}")

    @property
    def numbers(self) -> int:
        """Numbers of a row."""
        return self.groups * self.size

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a row."""
        if self.format == "bfloat16":
            return 2 * self.numbers
        return _SCALE_BYTES * self.groups + (self.numbers if self.format == "int8" else (self.numbers + 1) // 2)

    def encode(self, rows: Tensor) -> bytes:
        """Rows [n, numbers] of any floating type -> n·bytes_per_token bytes.

        Numbers that are far too large become the largest that can be written; infinities count as the largest finite number of
        their group, and NaN as 0, so that one such number does not cost its neighbours their precision.
        """
        if rows.dim() != 2 or rows.shape[1] != self.numbers:
            raise InvalidMemoryError(f"expected rows of {self.numbers} numbers, got a tensor of shape {list(rows.shape)}")
        if not len(rows):
            return b""
        groups = rows.detach().to("cpu", torch.float32).view(len(rows), self.groups, self.size)
        largest = groups.masked_fill(~groups.isfinite(), 0.0).abs().amax(-1, keepdim=True)
        groups = torch.minimum(torch.maximum(groups, -largest), largest).nan_to_num(nan=0.0)
        if self.format == "bfloat16":
            greatest = torch.finfo(torch.bfloat16).max
            return _to_bytes(groups.clamp(-greatest, greatest).to(torch.bfloat16).view(len(rows), -1))
        levels = _LEVELS[self.format]
        scales = (largest / levels).clamp(max=_LARGEST_SCALE).half()
        # By the scale as it is sent: its own rounding then costs nothing.
        steps = groups / scales.float().masked_fill(scales == 0, 1.0)
        codes = steps.round().clamp(-levels, levels).to(torch.int8).view(len(rows), -1)
        packed = codes.view(torch.uint8) if self.format == "int8" else _pack(codes)
        return _to_bytes(torch.cat((scales.view(len(rows), -1).view(torch.uint8), packed), dim=1))

    def decode(self, data: bytes) -> Tensor:
        """What ``encode`` gave, here or elsewhere -> rows [n, numbers] in float32; raises InvalidMemoryError for anything else."""
        size = self.bytes_per_token
        if len(data) % size:
            raise InvalidMemoryError(f"{len(data)} bytes are no whole rows: a row of {self.format} memory has {size} bytes")
        if not data:
            return torch.empty(0, self.numbers)
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, size)
        if self.format == "bfloat16":
            rows = raw.flatten().view(torch.bfloat16).float().view(-1, self.numbers)
            if not bool(rows.isfinite().all()):
                raise InvalidMemoryError("bfloat16 memory holds a number that is not finite")
            return rows
        split = _SCALE_BYTES * self.groups
        scales = raw[:, :split].flatten().view(torch.float16).float()
        if not bool((scales.isfinite() & (scales >= 0)).all()):
            raise InvalidMemoryError(f"{self.format} memory holds a scale that is negative or not finite")
        codes = raw[:, split:].view(torch.int8) if self.format == "int8" else _unpack(raw[:, split:])
        if bool((codes < -_LEVELS[self.format]).any()):
            raise InvalidMemoryError(f"{self.format} memory holds a number below -{_LEVELS[self.format]}")
        if bool(codes[:, self.numbers :].any()):
            raise InvalidMemoryError("the unused half of a row's last byte is not 0")
        codes = codes[:, : self.numbers]
        return (codes.reshape(-1, self.groups, self.size).float() * scales.view(-1, self.groups, 1)).view(-1, self.numbers)


@dataclass(frozen=True, slots=True)
class MemoryCodec:
    """What travels of a drafter's memory: ``rows`` of every verified token, ``newest`` of the last one (None: has no entry)."""

    rows: RowCodec
    newest: RowCodec | None

    @classmethod
    def of(cls, config: MoAConfig, format: MemoryFormat) -> MemoryCodec:
        """For one drafter; the newest memory is quantized in stretches of a head's size, as far as those divide it."""
        newest = _of_hidden(config.target, format) if config.has_entry else None
        return cls(RowCodec(format, 2 * config.ca_num_kv_heads, config.target.head_dim), newest)

    @classmethod
    def of_hidden(cls, target: DecoderConfig, format: MemoryFormat) -> MemoryCodec:
        """For drafters that need of every token as many numbers as a hidden state has: EAGLE's features."""
        return cls(_of_hidden(target, format), None)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a verified token."""
        return self.rows.bytes_per_token

    @property
    def newest_bytes(self) -> int:
        """Bytes of the newest memory; 0 where none is needed."""
        return 0 if self.newest is None else self.newest.bytes_per_token


def _of_hidden(target: DecoderConfig, format: MemoryFormat) -> RowCodec:
    """E numbers, in stretches of a head's size as far as those divide it."""
    stretch = math.gcd(target.head_dim, target.hidden_size)
    return RowCodec(format, target.hidden_size // stretch, stretch)


def _pack(codes: Tensor) -> Tensor:
    """Signed codes [n, k] of four bits -> two to a byte [n, ⌈k/2⌉]."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    nibbles = codes.view(torch.uint8) & 0x0F
    return nibbles[:, ::2] | (nibbles[:, 1::2] << 4)


def _unpack(packed: Tensor) -> Tensor:
    """The inverse of ``_pack``: [n, k] bytes -> [n, 2k] signed codes."""
    nibbles = torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(1).view(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)


def _to_bytes(rows: Tensor) -> bytes:
    return rows.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
