"""Waiting with a limit, and without end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


async def set_within(event: asyncio.Event, timeout: float) -> bool:
    """Whether ``event`` is set within ``timeout`` seconds."""
    if event.is_set():
        return True
    waiting = asyncio.ensure_future(event.wait())  # not wait_for: see `ended`
    try:
        await asyncio.wait({waiting}, timeout=timeout)
        return waiting.done() or event.is_set()
    finally:
        waiting.cancel()


async def within(work: Awaitable[T], timeout: float) -> T:
    """What ``work`` gives; TimeoutError where that takes longer than ``timeout`` seconds. It has ended when this has."""
    task = asyncio.ensure_future(work)  # not wait_for: see `ended`
    try:
        await asyncio.wait({task}, timeout=timeout)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        await ended({task})


async def for_ever() -> NoReturn:
    """Wait until cancelled."""
    while True:
        await asyncio.Event().wait()


async def ended(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks until they have ended: before Python 3.12 a `wait_for` in one may answer a cancellation with its result."""
    under_way = set(tasks)
    while under_way:
        for task in under_way:
            task.cancel()
        done, under_way = await asyncio.wait(under_way, timeout=1.0)
        for task in done:
            if not task.cancelled():
                task.exception()  # it has been seen
