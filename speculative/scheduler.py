"""Who runs: admission, slots and prefill chunks. Bookkeeping only, no tensors.

Decoding sequences hold the slots 0…D−1 without a gap, so that a batch is one stretch of the cache and is read without copying; the
sequence that is being prefilled holds slot D. When a sequence ends, the last ones move into its place.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile

from speculative.prefill_budget import PrefillBudget
from speculative.sequence import Sequence

LONG = 16
"""Stretches, of a prompt that was read beside texts: to whom has waited for so many, a step more is nothing."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Run the tokens ``start`` … ``end`` of one sequence's prompt."""

    sequence: Sequence
    start: int
    end: int

    @property
    def last(self) -> bool:
        """Whether what is to be read ends here."""
        return self.end == self.sequence.num_given_tokens


@dataclass(frozen=True, slots=True)
class SlotMove:
    """Copy the first ``length`` cached tokens of slot ``source`` to ``destination``."""

    source: int
    destination: int
    length: int


class Scheduler:
    """First come, first served within a priority; prompts are prefilled in chunks between steps, so that streams keep flowing.

    ``budget`` says how long these are, at most ``prefill_chunk`` tokens a step. Where texts that wait for trees from outside hold
    three quarters of the slots, others of the same priority go before more of them, which would hold what is left in the same way.
    ``admitted`` is called with each sequence that gets a slot, and may find that some of its tokens are computed already.
    """

    def __init__(self, num_slots: int, prefill_chunk: int, admitted: Callable[[Sequence], None] = lambda _: None) -> None:
        self.num_slots, self.budget, self._admitted = num_slots, PrefillBudget(prefill_chunk), admitted
        self.waiting: deque[Sequence] = deque()
        self.prefilling: Sequence | None = None
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        """True while any request can go on."""
        can_admit = bool(self.waiting) and len(self.running) < self.num_slots
        return can_admit or self.prefilling is not None or any(not sequence.waits for sequence in self.running)

    @property
    def holding(self) -> list[Sequence]:
        """Those that hold a slot."""
        prefilling = self.prefilling  # looked at once: whoever asks for the engine's status does so from another thread
        return self.running.copy() if prefilling is None else [*self.running, prefilling]

    @property
    def active(self) -> list[Sequence]:
        """All that have come and not ended."""
        return [*self.holding, *self.waiting]

    def batch(self, *, have_waited: bool = False) -> list[Sequence]:
        """Who goes on in this step: running sequences in neighbouring slots, from the first to the last that can.

        Those between them that wait for a tree take part and gain nothing, which costs less than closing gaps. Where drafts are
        made here the first slot is among them, as drafters count from it. Where others ``have_waited`` while the end of a long
        prompt was read, its text waits for this step in turn: its part of one takes long, too.
        """
        ready = [sequence for sequence in self.running if not sequence.waits]
        if have_waited and len(ready) > 1 and _was_just_read(ready[-1]):
            ready.pop()
        if not ready:
            return []
        first = 0 if any(sequence.drafts_here for sequence in ready) else ready[0].slot
        return self.running[first : ready[-1].slot + 1]

    def add(self, sequence: Sequence) -> None:
        """Queue a request behind those that are no less urgent."""
        priority = sequence.request.priority
        behind = next((place for place, other in enumerate(self.waiting) if other.request.priority > priority), len(self.waiting))
        self.waiting.insert(behind, sequence)

    def schedule(self) -> Iterator[PrefillChunk]:
        """Admit what fits: this step's prefill chunks, as many as the budget has room for, each to be run before the next."""
        self.budget.begin(len(self.running), max(0, len(self.waiting) - (self.prefilling is None)))
        while self.budget.left:
            sequence = self.prefilling or self._admit()
            if sequence is None:
                break
            start = sequence.num_computed
            count = self.budget.take(start, sequence.num_given_tokens - start)
            if not count:
                break
            chunk = PrefillChunk(sequence, start, start + count)
            yield chunk
            if not chunk.last:
                break
            self.running.append(sequence)
            self.prefilling = None

    def _admit(self) -> Sequence | None:
        if not self.waiting or len(self.running) >= self.num_slots:
            return None
        self.prefilling = self._next()
        self.waiting.remove(self.prefilling)
        self.prefilling.slot = len(self.running)
        self.prefilling.scheduled_time = time.monotonic()
        self._admitted(self.prefilling)
        return self.prefilling

    def _next(self) -> Sequence:
        first = self.waiting[0]
        if not first.request.remote or sum(each.waits for each in self.running) < max(1, self.num_slots * 3 // 4):
            return first
        equals = takewhile(lambda each: each.request.priority == first.request.priority, self.waiting)
        return next((each for each in equals if not each.request.remote), first)

    def find(self, request_id: str) -> Sequence | None:
        """The unfinished sequence of that request."""
        return next((sequence for sequence in self.active if sequence.request.request_id == request_id), None)

    def remove(self, sequence: Sequence) -> list[SlotMove]:
        """Forget a sequence, and say which slots must be copied to close the gap, in order."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            return []
        moves: list[SlotMove] = []
        if sequence is self.prefilling:
            self.prefilling = None
        else:
            last = self.running.pop()
            freed = last.slot
            if last is not sequence:
                moves.append(SlotMove(last.slot, sequence.slot, last.num_computed))
                last.slot = sequence.slot
                self.running[last.slot] = last
            if self.prefilling is not None:
                moves.append(SlotMove(self.prefilling.slot, freed, self.prefilling.num_computed))
                self.prefilling.slot = freed
        sequence.slot = -1
        return moves

    def check_integrity(self) -> None:
        """Raise AssertionError when slots and sequences disagree (for tests)."""
        assert [sequence.slot for sequence in self.running] == list(range(len(self.running)))
        assert self.prefilling is None or self.prefilling.slot == len(self.running)
        assert len(self.holding) <= self.num_slots
        assert all(sequence.slot == -1 for sequence in self.waiting)


def _was_just_read(sequence: Sequence) -> bool:
    """Whether a long prompt's text has its first token, and no more."""
    return sequence.num_computed == sequence.num_given_tokens and sequence.num_target_calls >= LONG
