"""How long an event loop keeps its callbacks waiting, and where its thread and the others were meanwhile."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final

BEAT_S: Final = 0.005
FRAMES: Final = 4


@dataclass(frozen=True, slots=True)
class Block:
    """A time in which nothing else ran on the loop: seconds, processor seconds of its thread in them, and stacks of threads.

    Where both are nearly equal, the loop's own code took the time; else its thread waited for the interpreter's lock or for a core.
    ``where`` is the loop's stack, innermost first, ``others`` those of other threads; all are empty for short blocks. Code that
    keeps the interpreter's lock is not interrupted for this: the stacks are then those right behind it.
    """

    seconds: float
    cpu_seconds: float
    where: tuple[str, ...] = ()
    others: tuple[tuple[str, ...], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "milliseconds": round(self.seconds * 1e3, 1),
            "cpu_milliseconds": round(self.cpu_seconds * 1e3, 1),
            "where": list(self.where),
            "others": [list(frames) for frames in self.others],
        }


class LoopWatch:
    """Watches the running loop while it is entered; ``longest`` is the longest block, ``over`` counts those above ``threshold``."""

    def __init__(self, threshold: float = 0.02) -> None:
        self.threshold = threshold
        self.longest, self.over = Block(0.0, 0.0), 0
        self._thread = threading.get_ident()
        self._beats = 0
        self._due = self._cpu = 0.0
        self._stacks: dict[int, tuple[str, ...]] = {}
        self._ended = threading.Event()
        self._looking = threading.Thread(target=self._look, name="loop-watch", daemon=True)
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> LoopWatch:
        self._expect()
        self._looking.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._timer is not None
        self._timer.cancel()
        self._ended.set()
        self._looking.join()

    def _expect(self) -> None:
        self._due, self._cpu = time.perf_counter() + BEAT_S, time.thread_time()
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._beat)

    def _beat(self) -> None:
        late, cpu = time.perf_counter() - self._due, time.thread_time() - self._cpu
        stacks, self._stacks = self._stacks, {}
        self._beats += 1
        if late > self.threshold:
            self.over += 1
        if late > self.longest.seconds:
            where = stacks.pop(self._thread, ())
            self.longest = Block(late, cpu, where, tuple(stacks.values()))
        self._expect()

    def _look(self) -> None:
        """In a thread: note where all threads are whenever a beat is late."""
        looked = -1
        while not self._ended.wait(BEAT_S):
            if self._beats != looked and time.perf_counter() > self._due + self.threshold:
                looked = self._beats
                frames = sys._current_frames()
                self._stacks = {thread: stack(each) for thread, each in frames.items() if thread != threading.get_ident()}


def stack(frame: FrameType | None) -> tuple[str, ...]:
    """The innermost frames, as "folder/file.py:line function"."""
    told: list[str] = []
    while frame is not None and len(told) < FRAMES:
        path = Path(frame.f_code.co_filename)
        told.append(f"{path.parent.name}/{path.name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(told)
