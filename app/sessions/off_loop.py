"""What takes long for large values is done where nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")

IN_LOOP_BYTES: Final = 256 * 2**10
"""More than this is worked at in a thread: digests of a MiB take a millisecond, JSON ten."""


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """What ``work`` gives, which has ``size`` bytes to go through."""
    return work() if size <= IN_LOOP_BYTES else await asyncio.to_thread(work)
