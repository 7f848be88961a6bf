"""One text over as many replicas as it takes."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from itertools import zip_longest
from typing import Final

from speculative.request import Request, RequestOutput, RequestStats

BEFORE_OTHERS: Final = 2**64
"""By how much the priority of a text that goes on is before its own: somebody reads it, and nobody what waits yet."""


class Continuation:
    """A request, what was written of it, and so what a replica is to be asked that goes on with it.

    Noise depends on seed and position alone, and a text's seed is drawn here: so any replica writes the same. ``row_bytes`` are
    those of a row of the drafter's memory, where that is sent. What is told counts times on this process's monotonic clock.
    """

    def __init__(self, request: Request, row_bytes: int = 0) -> None:
        if request.params.seed is None:
            request = replace(request, params=replace(request.params, seed=secrets.randbits(63)))
        self._request, self._row_bytes = request, row_bytes
        self._tokens: list[int] = []
        self._characters = 0
        self._memory_end = request.memory_from
        self._before = self._stats = RequestStats()
        self._arrival = time.monotonic()
        self._ahead = 0.0
        self.attempt = 0
        self.replica = ""
        self.is_answered = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """What was written of it so far, here and before."""
        return (*self._request.output_token_ids, *self._tokens)

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return len(self._request.given_token_ids) + len(self._tokens)

    @property
    def request(self) -> Request:
        """What the next replica is asked; each is asked under another id."""
        if not self.attempt:
            return self._request
        params = self._request.params
        if self._tokens:  # they were told with the first of these
            params = replace(params, prompt_logprobs=None)
        return replace(
            self._request,
            request_id=f"{self._request.request_id}+{self.attempt}",
            params=params,
            priority=self._request.priority - BEFORE_OTHERS,
            output_token_ids=self.tokens,
            text_length=self._request.text_length + self._characters,
            memory_from=self._memory_end,
        )

    def placed(self, replica: str, now: float) -> None:
        """A replica has taken it, whose monotonic clock says ``now``."""
        if replica != self.replica:
            self.replica, self._ahead = replica, time.monotonic() - now

    def lost(self) -> None:
        """That replica is lost: ``request`` is for another."""
        self.attempt += 1
        self.replica, self.is_answered = "", False
        self._before = self._stats

    def take(self, output: RequestOutput) -> RequestOutput:
        """An output of the present replica -> what it is of the whole text."""
        self._tokens += output.new_token_ids
        self._characters += len(output.text_delta)
        self.is_answered = self.is_answered or bool(output.new_token_ids)
        if (memory := output.memory) is not None and self._row_bytes:
            self._memory_end = max(self._memory_end, memory.first + len(memory.rows) // self._row_bytes)
        self._stats = _sum(self._before, self._on_this_clock(output.stats))
        return replace(output, request_id=self._request.request_id, stats=self._stats)

    def _on_this_clock(self, stats: RequestStats) -> RequestStats:
        def here(moment: float | None) -> float | None:
            return None if moment is None else max(self._arrival, moment + self._ahead)

        return replace(
            stats,
            arrival_time=self._arrival,
            scheduled_time=here(stats.scheduled_time),
            first_token_time=here(stats.first_token_time),
            last_token_time=here(stats.last_token_time),
        )


def _sum(before: RequestStats, since: RequestStats) -> RequestStats:
    """What two replicas have done for a text, one after the other. The later one has followed the prediction from its beginning."""
    if not before.prompt_tokens:
        return since
    if not since.prompt_tokens:
        return before
    counts = zip_longest(before.acceptance_histogram, since.acceptance_histogram, fillvalue=0)
    return replace(
        since,
        completion_tokens=before.completion_tokens + since.completion_tokens,
        cached_tokens=before.cached_tokens,
        num_drafts=before.num_drafts + since.num_drafts,
        num_draft_tokens=before.num_draft_tokens + since.num_draft_tokens,
        num_accepted_draft_tokens=before.num_accepted_draft_tokens + since.num_accepted_draft_tokens,
        num_target_calls=before.num_target_calls + since.num_target_calls,
        acceptance_histogram=tuple(map(sum, counts)),
        scheduled_time=since.scheduled_time if before.scheduled_time is None else before.scheduled_time,
        first_token_time=since.first_token_time if before.first_token_time is None else before.first_token_time,
        last_token_time=before.last_token_time if since.last_token_time is None else since.last_token_time,
    )
