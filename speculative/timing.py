"""Where the engine's time goes."""

from __future__ import annotations

import time
from typing import Final

PHASES: Final = ("prefill", "draft", "verify", "commit")
"""Of a step, in order; choosing the accepted tokens belongs to verifying, and what the drafter does with them to committing."""


class StepClock:
    """Seconds spent in each phase since the engine was made, and steps begun. One thread runs it, any may read it.

    It is wall-clock time of the engine's thread: on a GPU, work that is still queued counts for the phase that waits for it.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._since = 0.0

    def begin(self) -> None:
        """A step begins."""
        self.steps += 1
        self._since = time.perf_counter()

    def end(self, phase: str) -> None:
        """What has been done since the last call was this phase."""
        now = time.perf_counter()
        self._seconds[phase] += now - self._since
        self._since = now

    def seconds(self) -> dict[str, float]:
        """A snapshot, by phase."""
        return dict(self._seconds)
