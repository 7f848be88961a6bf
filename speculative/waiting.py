"""Waiting with a limit, and without end."""

from __future__ import annotations

import asyncio
from typing import NoReturn


async def set_within(event: asyncio.Event, timeout: float) -> bool:
    """Whether ``event`` is set within ``timeout`` seconds."""
    try:
        await asyncio.wait_for(event.wait(), timeout)
    except asyncio.TimeoutError:
        return False
    return True


async def for_ever() -> NoReturn:
    """Wait until cancelled."""
    while True:
        await asyncio.Event().wait()


async def ended(task: asyncio.Task[None]) -> None:
    """Cancel a task until it has ended: before Python 3.12 a `wait_for` in it may answer a cancellation with its result."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=1.0)
