"""Waiting with a limit, and for tasks to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from speculative.waiting import ended, within


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


async def test_what_takes_too_long_is_given_up_and_has_ended_then() -> None:
    ends: list[str] = []

    async def generated() -> AsyncGenerator[int, None]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            ends.append("ended")

    numbers = generated()
    assert await within(anext(numbers), 30) == 1
    with pytest.raises(TimeoutError):
        await within(anext(numbers), 0.01)
    assert ends == ["ended"]
    await numbers.aclose()  # it is not running any more
    with pytest.raises(StopAsyncIteration):
        await within(anext(numbers), 30)


async def test_a_cancellation_is_not_answered_with_a_result_that_came_at_the_same_time() -> None:
    arrived: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(within(arrived, 30))
    await asyncio.sleep(0)
    arrived.set_result(1)
    await asyncio.sleep(0)  # whoever waits for it is about to be woken
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
