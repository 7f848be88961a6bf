"""What all texts of an edge share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from speculative.edge.config import Offline
from speculative.edge.drafting import EdgeModel
from speculative.edge.link import Link
from speculative.edge.policy import EdgePolicy
from speculative.policy import DraftShape

T = TypeVar("T")

logger = logging.getLogger("moaserve.edge")


@dataclass(slots=True)
class Tally:
    """What an edge has done so far, all its texts together."""

    num_steps: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    latest: DraftShape | None = None
    offline_tokens: int = 0
    corrected_tokens: int = 0


class Worker(ThreadPoolExecutor):
    """One thread, of which one can tell how long it has been at its work."""

    def __init__(self) -> None:
        super().__init__(1, "moaserve-edge")
        self.busy_since: float | None = None
        self._num_awaited = 0

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for it."""
        return not self._num_awaited

    async def compute(self, work: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Run ``work`` there; for one event loop. A result that nobody waits for any more is ``undo``'s, there too."""
        self._num_awaited += 1
        job = self.submit(work)
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            if undo is not None:
                self.soon(lambda: None if job.cancelled() or job.exception() is not None else undo(job.result()))
            raise
        finally:
            self._num_awaited -= 1

    def soon(self, work: Callable[[], object]) -> None:
        """Run ``work`` there, behind what is to be computed already. Nobody waits for it, so what goes wrong is logged."""
        self.submit(work).add_done_callback(_complain)

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """As in Executor."""

        def timed() -> Any:
            self.busy_since = time.monotonic()
            try:
                return work(*arguments, **options)
            finally:
                self.busy_since = None

        return super().submit(timed)


def _complain(job: Future[Any]) -> None:
    if not job.cancelled() and (error := job.exception()) is not None:
        logger.error("a text's drafter was not given back", exc_info=error)


@dataclass(frozen=True, slots=True)
class Workplace:
    """Where texts are written. They wait ``patience`` seconds for a lost connection, and then do what ``offline`` says."""

    link: Link
    model: EdgeModel
    worker: Worker
    policy: EdgePolicy
    tally: Tally
    patience: float
    offline: Offline
