"""Ctrl-C in the middle of a measurement: what was whole by then is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def until_interrupted(whole: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C ends the block, and goes on to the caller where nothing is ``whole`` yet."""
    try:
        yield
    except KeyboardInterrupt:
        if not whole():
            raise
