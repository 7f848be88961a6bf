"""An observer that remembers."""

from __future__ import annotations

import asyncio
from collections import Counter


class Seen:
    """What a store has told: outcomes by operation, how many operations were timed, bytes, and whether Redis is there."""

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.timed: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.changes: list[bool] = []
        self._changed = asyncio.Event()

    def ended(self, operation: str, outcome: str) -> None:
        self.outcomes[operation, outcome] += 1

    def took(self, operation: str, seconds: float) -> None:
        assert seconds >= 0
        self.timed[operation] += 1

    def carried(self, direction: str, size: int) -> None:
        self.bytes[direction] += size

    def reachable(self, is_up: bool) -> None:
        self.changes.append(is_up)
        self._changed.set()

    async def until(self, is_up: bool) -> None:
        """Wait until Redis is last known to be there, or not."""

        async def wait() -> None:
            while not self.changes or self.changes[-1] is not is_up:
                self._changed.clear()
                await self._changed.wait()

        await asyncio.wait_for(wait(), 30)
