"""Operators for CPUs that multiply tiles (AMX), as compiled graphs call them.

They are part of the library that ``graph_runner`` builds, and graphs call them by their C names: through PyTorch's dispatcher a
call would cost as much as the work on a few rows.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

LIBRARY = torch.library.Library("moaserve", "FRAGMENT")

_FOLDER = Path(__file__).parent
SOURCES = tuple(_FOLDER / f"{name}.cpp" for name in ("cached_attention", "tiled_linear", "tiled_decoder"))
"""What is compiled."""

HEADERS = tuple(_FOLDER / f"{name}.h" for name in ("tiles", "tiled_product", "cached_attention"))


def has_tiles() -> bool:
    """Whether this CPU has what the operators are for."""
    return torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_amx_tile_supported()


def source_fingerprint() -> str:
    """Identifies the operators, for graphs that use them."""
    return hashlib.sha256(b"".join(source.read_bytes() for source in (*SOURCES, *HEADERS))).hexdigest()[:16]
