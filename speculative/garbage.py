"""Garbage collection in processes that serve, and memory that is given back."""

from __future__ import annotations

import contextlib
import ctypes
import gc


def keep_what_is_loaded() -> None:
    """Collect garbage, and never look at what is left again: looking stops all threads, for 0.4 s where PyTorch is imported."""
    gc.collect()
    gc.freeze()


def give_back_freed_memory() -> None:
    """Return to the system what was freed amid what is still in use, as loaded weights are that others stand in for."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)
