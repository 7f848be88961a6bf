"""Responses that are worked at while nobody waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

GRACE_S = 2.0


@dataclass(slots=True)
class _Job:
    task: asyncio.Task[None]
    on_cancel: Callable[[], Awaitable[None]]
    ending: asyncio.Task[None] | None = None
    """Cancels it and notes that: one for all who ask."""


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
        """Do ``work``, ``on_cancel`` once where `cancel` ended it, and ``on_end`` however it ended, begun or not."""
        key = owner, response_id
        task = asyncio.create_task(work)
        job = self._jobs[key] = _Job(task, on_cancel)

        def ended(_: asyncio.Task[None]) -> None:
            if job.ending is None:
                del self._jobs[key]
            on_end()

        task.add_done_callback(ended)

    async def cancel(self, owner: str, response_id: str) -> None:
        """End a job, if it runs; it has ended, and nothing more is noted of it, when this returns."""
        key = owner, response_id
        job = self._jobs.get(key)
        if job is None:
            return
        if job.ending is None:
            job.ending = asyncio.create_task(self._end(job))
            job.ending.add_done_callback(lambda _: self._jobs.pop(key))  # till then whoever comes must wait for it
        await asyncio.shield(job.ending)  # the others wait for it too

    async def _end(self, job: _Job) -> None:
        job.task.cancel()
        await asyncio.wait([job.task])
        if job.task.cancelled():  # it may have come to its own end before
            await job.on_cancel()

    async def close(self) -> None:
        """Let the jobs of an engine that has stopped note how they ended."""
        tasks = [job.ending or job.task for job in self._jobs.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=GRACE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
