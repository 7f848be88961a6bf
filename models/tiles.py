"""Operators for CPUs that multiply bfloat16 by tiles (AMX) or by vectors (AVX512-BF16), as compiled graphs call them.

They are part of the library that ``graph_runner`` builds, and graphs call them by their C names: through PyTorch's dispatcher a
call would cost as much as the work on a few rows.
"""

from __future__ import annotations

from functools import cache

import torch

LIBRARY = torch.library.Library("moaserve", "FRAGMENT")

_loaded = False


def loaded() -> bool:
    """Whether the library has been loaded, so that operators can be called. It stays so."""
    global _loaded
    _loaded = _loaded or torch._C._dispatch_has_kernel_for_dispatch_key("moaserve::tiled_linear", "CPU")
    return _loaded


@cache
def has_tiles() -> bool:
    """Whether this CPU has what the operators are for."""
    return torch.cpu._is_avx512_bf16_supported()
