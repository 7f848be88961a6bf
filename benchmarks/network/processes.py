"""Servers and edges as processes of their own: started on a core, read, measured and stopped."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from speculative.memory_measuring import resident_bytes

_READY = re.compile(r"ready at (https?://\S+)/v1")
_STOPPING_S = 20.0
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class ProcessError(Exception):
    """A server or an edge did not start; the message holds what it said."""


@dataclass(frozen=True, slots=True)
class Cores:
    """Which cores run what: the server, edges in turn, and whatever asks them, which must not disturb the server."""

    server: frozenset[int]
    edges: tuple[frozenset[int], ...]
    client: frozenset[int]

    @classmethod
    def split(cls, available: Sequence[int]) -> Cores | None:
        """One core for the server, the others for edges, which share them with the client; None where there is only one."""
        first, *others = sorted(available) or [0]
        if not others:
            return None
        return cls(frozenset({first}), tuple(frozenset({core}) for core in others), frozenset(others))

    def describe(self) -> str:
        """In words."""
        edges = ", ".join(str(core) for edge in self.edges for core in edge)
        return f"server on core {min(self.server)}; edges, client and relay on core {edges}; one thread each"


def usable_cores() -> list[int]:
    """Those that this process may run on; none where the system cannot pin."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@contextmanager
def pinned(cores: frozenset[int] | None) -> Iterator[None]:
    """Run on ``cores`` alone; so does what is started meanwhile, for good."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Process:
    """A running server, such as `moaserve serve` or `moaserve edge`; ``url`` is where it answers, without ``/v1``."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, log: list[str], reader: asyncio.Task[None]) -> None:
        self._process, self.url, self.log, self._reader = process, url, log, reader

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        cores: frozenset[int] | None,
        *,
        ready: re.Pattern[str] = _READY,
        environment: Mapping[str, str] = _ONE_THREAD,
    ) -> Process:
        """Until it says that it is ``ready``, and where; raises ProcessError when it ends instead."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MOASERVE_")}
        with pinned(cores):
            process = await asyncio.create_subprocess_exec(
                *command,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=inherited | {"PYTHONUNBUFFERED": "1", **environment},
            )
        assert process.stdout is not None
        log: list[str] = []
        try:
            async for line in process.stdout:
                log.append(line.decode(errors="replace"))
                if found := ready.search(log[-1]):
                    # Keep reading: a full pipe would stop it.
                    reader = asyncio.create_task(_read(process.stdout, log))
                    return cls(process, found.group(1), log, reader)
        except BaseException:
            process.kill()
            await process.wait()
            raise
        code = await process.wait()
        raise ProcessError(f"{' '.join(command)} ended with {code} instead of starting:\n{''.join(log[-20:])}")

    @property
    def cpu_seconds(self) -> float | None:
        """Processor time of all its threads so far; None where the system does not tell."""
        return cpu_seconds(self._process.pid)

    @property
    def loop_seconds(self) -> float | None:
        """Processor time of its main thread alone, which runs the event loop; None where the system does not tell."""
        try:
            return int(Path(f"/proc/{self._process.pid}/schedstat").read_text().split()[0]) / 1e9
        except OSError:
            return None

    @property
    def resident_bytes(self) -> int:
        """Memory that it has now; 0 where the system does not tell."""
        return resident_bytes(self._process.pid) or 0

    async def stop(self) -> None:
        """SIGTERM, and if that does not help, the end."""
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), _STOPPING_S)
            except asyncio.TimeoutError:
                self._process.kill()
                await self._process.wait()
        await self._reader


def cpu_seconds(pid: int) -> float | None:
    """Processor time that the living threads of a process have had, to the nanosecond; None where the system does not tell."""
    try:
        times = [int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    except OSError:
        return None
    return sum(times) / 1e9 if times else None


def moaserve(*arguments: str) -> list[str]:
    """The command line of a sub-command of this very program."""
    return [sys.executable, "-m", "app.cli", *arguments]


async def _read(stream: asyncio.StreamReader, log: list[str]) -> None:
    while said := await stream.read(2**16):
        log.append(said.decode(errors="replace"))
