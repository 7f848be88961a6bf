"""Waiting for tasks to end."""

from __future__ import annotations

import asyncio

from speculative.waiting import ended


async def test_a_task_that_answers_a_cancellation_with_a_result_is_cancelled_again() -> None:
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 2:
                    raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await asyncio.wait_for(ended({task}), 30)
    assert task.cancelled() and swallowed == 2
