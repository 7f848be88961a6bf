"""Garbage collection in processes that serve."""

from __future__ import annotations

import gc


def keep_what_is_loaded() -> None:
    """Collect garbage, and never look at what is left again: looking stops all threads, for 0.4 s where PyTorch is imported."""
    gc.collect()
    gc.freeze()
