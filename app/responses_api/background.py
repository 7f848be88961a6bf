"""Responses that are worked at while nobody waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class _Job:
    task: asyncio.Task[None]
    on_cancel: Callable[[], Awaitable[None]]


class BackgroundJobs:
    """The jobs of one application, each under its owner and the id of its response."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[str, str], _Job] = {}

    def start(
        self,
        owner: str,
        response_id: str,
        work: Coroutine[Any, Any, None],
        on_cancel: Callable[[], Awaitable[None]],
        on_end: Callable[[], None],
    ) -> None:
        """Do ``work``, ``on_cancel`` where `cancel` ended it, and ``on_end`` however it ended, begun or not."""
        key = owner, response_id
        task = asyncio.create_task(work)
        self._jobs[key] = _Job(task, on_cancel)
        task.add_done_callback(lambda _: self._jobs.pop(key, None))
        task.add_done_callback(lambda _: on_end())

    async def cancel(self, owner: str, response_id: str) -> None:
        """End a job, if it runs; it has ended when this returns."""
        job = self._jobs.get((owner, response_id))
        if job is None:
            return
        job.task.cancel()
        await asyncio.wait([job.task])
        if job.task.cancelled():  # it may have come to its own end before
            await job.on_cancel()

    async def close(self) -> None:
        """Let the jobs of an engine that has stopped note how they ended."""
        tasks = [job.task for job in self._jobs.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=GRACE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
