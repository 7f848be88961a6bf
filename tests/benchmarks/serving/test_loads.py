"""Loads that wait for nobody, and loads that wait."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from benchmarks.serving.client import Address, Outcome, ask
from benchmarks.serving.loads import LEAD_S, closed_loop, open_loop, sustained_rate
from tests.benchmarks.serving.scripted import scripted, three_words


class Time:
    """Passes when it is slept, a little even when for no time; the first sleep after a while is ``stall`` seconds too long."""

    def __init__(self, stall: float = 0.0, after: float = 0.0) -> None:
        self.now = 50.0
        self._stall, self._stalls_at = stall, self.now + after

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)  # what was begun before runs first
        self.now += max(seconds, 1e-4)
        if self.now > self._stalls_at:
            self.now += self._stall
            self._stall = 0.0


async def test_requests_are_sent_at_their_times() -> None:
    time = Time()

    async def send(number: int, due: float) -> tuple[int, float, float]:
        return number, due, time.now

    began = time.now + LEAD_S
    sent = await open_loop([0.5, 1.0, 4.0], send, time.clock, time.sleep)
    assert [number for number, _, _ in sent] == [0, 1, 2]
    assert [due - began for _, due, _ in sent] == pytest.approx([0.5, 1.0, 4.0])
    assert [now - began for _, _, now in sent] == pytest.approx([0.5, 1.0, 4.0], abs=1e-3)


async def test_what_a_stalled_generator_sends_late_is_due_at_its_time() -> None:
    """Five seconds in which nothing was sent are five seconds that users have waited."""
    time = Time(stall=5.0, after=LEAD_S + 1.5)
    service = 0.25

    async def send(number: int, due: float) -> Outcome:
        return Outcome(late=time.now - due, first=time.now + service - due, end=time.now + service - due)

    outcomes = await open_loop([1.0, 2.0, 3.0, 4.0, 20.0], send, time.clock, time.sleep)
    assert [outcome.late for outcome in outcomes] == pytest.approx([0, 5, 4, 3, 0], abs=0.01)
    assert [outcome.first for outcome in outcomes] == pytest.approx([0.25, 5.25, 4.25, 3.25, 0.25], abs=0.01)


async def test_nobody_waits_for_anothers_answer() -> None:
    """A server that answers nobody before everybody has asked: who waits for it would wait for ever."""
    count, asked, everybody = 20, 0, asyncio.Event()

    async def together(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        if asked == count:
            everybody.set()
        await everybody.wait()
        await three_words(body, writer)

    async with scripted(together) as server:
        address = Address.of(server.url)

        async def send(number: int, due: float) -> Outcome:
            return await ask(address, address.request("/completions", {"seed": number}), due, 60.0)

        outcomes = await open_loop([number / 1000 for number in range(count)], send)
    assert [outcome.error for outcome in outcomes] == [None] * count
    assert {body["seed"] for body in server.bodies} == set(range(count))


async def test_a_closed_loop_has_so_many_on_their_way_and_no_more() -> None:
    running = most = 0

    async def send(number: int, due: float) -> int:
        nonlocal running, most
        assert due <= time.perf_counter()
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return number

    assert await closed_loop(20, 4, send) == list(range(20))
    assert most == 4


def test_capacity_is_of_a_full_server() -> None:
    # Three at a time, a request a second while full; slow to begin and to end.
    ends = [10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0, 18.0, 40.0, 80.0]
    assert sustained_rate(ends, 3) == pytest.approx(1.0)
    assert sustained_rate([1.0, 1.5, 2.0, 2.5], 1) == pytest.approx(2.0)
