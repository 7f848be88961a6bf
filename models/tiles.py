"""Operators for x86 CPUs: products of bfloat16 by tiles (AMX) or by vectors (AVX512-BF16, AVX2), and of float32 by vectors.

They are part of the library that ``graph_runner`` builds, and graphs call them by their C names: through PyTorch's dispatcher a
call would cost as much as the work on a few rows.
"""

from __future__ import annotations

import os
import platform
from functools import cache
from typing import Any, Literal, TypeVar

import torch

LIBRARY = torch.library.Library("moaserve", "FRAGMENT")

TYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
"""What operators store."""

Instructions = Literal["AVX512-BF16", "AVX2"]
"""What operators are made of."""

_loaded = False

Value = TypeVar("Value")


def loaded() -> bool:
    """Whether the library has been loaded, so that operators can be called. It stays so."""
    global _loaded
    _loaded = _loaded or torch._C._dispatch_has_kernel_for_dispatch_key("moaserve::tiled_linear", "CPU")
    return _loaded


@cache
def instructions() -> Instructions | None:
    """What operators are made of on this CPU, or None: there are none.

    With ``ONEDNN_MAX_CPU_ISA=AVX2``, oneDNN's variable that says how much of a CPU to use, AVX2 is taken wherever there is more.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None
    if torch.cpu._is_avx512_bf16_supported() and os.environ.get("ONEDNN_MAX_CPU_ISA") != "AVX2":
        return "AVX512-BF16"
    return "AVX2" if torch.cpu._is_avx2_supported() else None


def has_operators() -> bool:
    """Whether there are operators for this CPU."""
    return instructions() is not None


def operator_class(name: str, dtype: torch.dtype) -> Any:
    """An operator with weights of its own, for those of a type."""
    return getattr(torch.classes.moaserve, f"{name}_{TYPES[dtype]}")


def in_rows(values: list[Value], rows: int) -> list[list[Value]]:
    """What an operator gives in one list, cut to so many."""
    if rows == 1:
        return [values]
    width = len(values) // rows
    return [values[first : first + width] for first in range(0, rows * width, width)] if width else [[] for _ in range(rows)]


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions for it; others are faster in float32, by whatever is not our own."""
    return device.type != "cpu" or has_tiles()


def has_tiles() -> bool:
    """Whether it multiplies bfloat16 itself: by tiles, or by vectors, which serve where tiles are asked for."""
    return instructions() == "AVX512-BF16"
