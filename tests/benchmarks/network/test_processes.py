"""Processes that say that they are ready."""

from __future__ import annotations

import os
import sys

import anyio
import pytest

from benchmarks.network.processes import Cores, Process, ProcessError, cpu_seconds, pinned, usable_cores

READY = "print('It is ready at http://127.0.0.1:1/v1: x', flush=True)"
SPIN = f"""
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
{READY}
print("x" * 200_000, flush=True)
print("cores", os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else "", flush=True)
signal.pause()
"""

needs_pinning = pytest.mark.skipif(not usable_cores(), reason="this system cannot pin processes to cores")


async def said(process: Process, what: str) -> None:
    with anyio.fail_after(20):
        while what not in "".join(process.log):
            await anyio.sleep(0.01)


async def test_a_process_is_ready_once_it_says_so_and_what_it_says_later_does_not_stop_it() -> None:
    process = await Process.start([sys.executable, "-c", SPIN], None)
    try:
        assert process.url == "http://127.0.0.1:1"
        await said(process, "cores")
    finally:
        await process.stop()


async def test_one_that_ends_instead_is_an_error_with_what_it_said() -> None:
    with pytest.raises(ProcessError, match="ended with 3 instead of starting:\nno model"):
        await Process.start([sys.executable, "-c", "import sys; print('no model'); sys.exit(3)"], None)


async def test_one_that_has_ended_can_be_stopped_again() -> None:
    process = await Process.start([sys.executable, "-c", READY], None)
    await process.stop()
    await process.stop()


@needs_pinning
async def test_a_process_keeps_to_its_cores_and_its_parent_to_all() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    process = await Process.start([sys.executable, "-c", SPIN], frozenset({core}))
    assert os.sched_getaffinity(0) == before
    await said(process, "cores")
    await process.stop()
    assert f"cores {{{core}}}\n" in "".join(process.log)


@needs_pinning
def test_cores_are_given_back_when_something_fails() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ZeroDivisionError), pinned(frozenset({min(before)})):
        assert os.sched_getaffinity(0) == {min(before)}
        _ = 1 / 0
    assert os.sched_getaffinity(0) == before


def test_the_server_has_a_core_of_its_own_where_there_are_two() -> None:
    assert Cores.split([]) is None and Cores.split([3]) is None
    two = Cores.split([5, 2])
    assert two == Cores(frozenset({2}), (frozenset({5}),), frozenset({5}))
    assert two is not None and two.describe() == "server on core 2; edges, client and relay on core 5; one thread each"
    four = Cores.split([0, 1, 2, 3])
    assert four is not None and [set(edge) for edge in four.edges] == [{1}, {2}, {3}] and four.client == {1, 2, 3}


def test_processor_time_grows_with_work_and_nobody_knows_that_of_no_process() -> None:
    before = cpu_seconds(os.getpid())
    if before is None:
        pytest.skip("this system does not tell processor time by thread")
    sum(range(3_000_000))
    after = cpu_seconds(os.getpid())
    assert after is not None and after > before
    assert cpu_seconds(2**22 + 1) is None
