"""Where the engine's time goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

PHASES: Final = ("prefill", "draft", "verify", "commit")
"""Of a step, in order; choosing the accepted tokens belongs to verifying, and what the drafter does with them to committing."""


class StepClock:
    """Seconds spent in each phase since the engine was made, and steps begun. One thread runs it, any may read it.

    ``of_step`` has those of the latest step alone. It is wall-clock time of the engine's thread, unless ``now`` tells another: on a
    GPU, work that is still queued counts for the phase that waits for it, unless ``settle`` waits for it at the end of each phase.
    """

    def __init__(self, settle: Callable[[], None] | None = None, now: Callable[[], float] = time.perf_counter) -> None:
        self._settle, self._now = settle, now
        self.steps = 0
        self.of_step = dict.fromkeys(PHASES, 0.0)
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._since = 0.0

    def begin(self) -> None:
        """A step begins."""
        self.steps += 1
        self.of_step = dict.fromkeys(PHASES, 0.0)
        self._since = self._now()

    def end(self, phase: str, *, usual: bool = True) -> float:
        """What has been done since the last call was this phase: its seconds. If it is not ``usual``, ``of_step`` leaves it out."""
        if self._settle is not None:
            self._settle()
        now = self._now()
        self._seconds[phase] += now - self._since
        if usual:
            self.of_step[phase] += now - self._since
        spent, self._since = now - self._since, now
        return spent

    def seconds(self) -> dict[str, float]:
        """A snapshot, by phase."""
        return dict(self._seconds)
