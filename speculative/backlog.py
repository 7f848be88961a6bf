"""What the drafter is still to be told: while nothing is drafted, it need not know."""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import accumulate

import torch
from torch import Tensor

from models.llama import Later
from speculative.drafters.base import VerifiedTokens
from speculative.sequence import Sequence

MOST_STEPS = 32
"""Steps that are remembered: telling of all would take a twentieth of the time that is saved."""

PORTION = 64
"""Tokens that are told between two steps, or four of each text: telling of all at once would hold every text up."""


class Backlog:
    """Prompts that were read and steps of plain decoding, in which every sequence gained one token.

    Telling a drafter of many tokens at once costs it less than one by one, and nothing where their texts have ended by then. One
    that ``can_skip`` is told of the latest only, and reads texts from there on.
    """

    def __init__(self, *, can_skip: bool) -> None:
        self._can_skip = can_skip
        self._prompts: list[tuple[Sequence, VerifiedTokens, Later | None]] = []
        self._steps: list[tuple[Many[Sequence], Tensor | None]] = []

    @property
    def waits(self) -> bool:
        """Whether there is anything to be told."""
        return bool(self._prompts or self._steps)

    @property
    def full(self) -> bool:
        """Whether some must be told before more is done."""
        return len(self._steps) >= MOST_STEPS and not self._can_skip

    def add_prompt(self, sequence: Sequence, verified: VerifiedTokens, tapped: Later | None) -> None:
        """A stretch of a prompt, the latest tokens that were computed of it; ``tapped`` is asked for when they are told."""
        sequence.num_untold += len(verified)
        self._prompts.append((sequence, verified, tapped))

    def add_step(self, batch: Many[Sequence], tapped: Tensor | None) -> None:
        """A step in which ``batch`` ran a token each; ``tapped`` [B, taps·E] as in VerifiedTokens."""
        for sequence in batch:
            sequence.num_untold += 1
        self._steps.append((batch, tapped))
        if len(self._steps) > MOST_STEPS:
            self._skip()

    def forget(self, sequence: Sequence) -> None:
        """It has ended: its prompt is not to be told."""
        self._prompts = [each for each in self._prompts if each[0] is not sequence]

    def _skip(self) -> None:
        """The oldest step, and prompts before it."""
        batch, _ = self._steps.pop(0)
        skipped = {id(sequence) for sequence in batch}
        for sequence, verified, _ in self._prompts:
            sequence.num_untold -= len(verified) if id(sequence) in skipped else 0
        self._prompts = [each for each in self._prompts if id(each[0]) not in skipped]
        for sequence in batch:
            sequence.num_untold -= 1
            sequence.drafter_start = sequence.num_computed + 1 - sequence.num_untold

    def take(self) -> list[VerifiedTokens]:
        """What is to be told now of those that still run, in this order: all."""
        return self._take(len(self._prompts), len(self._steps))

    def take_portion(self) -> list[VerifiedTokens]:
        """The same of a portion, the oldest first: prompts before steps."""
        most = max(PORTION, 4 * max((len(batch) for batch, _ in self._steps), default=0))
        prompts = _within(most, [len(verified) for _, verified, _ in self._prompts])
        if prompts:
            return self._take(prompts, 0)
        return self._take(0, _within(most, [len(batch) for batch, _ in self._steps]))

    def _take(self, num_prompts: int, num_steps: int) -> list[VerifiedTokens]:
        taken, self._prompts = self._prompts[:num_prompts], self._prompts[num_prompts:]
        prompts = []
        for sequence, verified, tapped in taken:
            sequence.num_untold -= len(verified)
            if sequence.slot >= 0:
                prompts.append(with_taps(verified.within(sequence.slot), tapped))  # it may have moved since
        steps, self._steps = self._steps[:num_steps], self._steps[num_steps:]
        return [*prompts, *_merged(steps)]


def with_taps(verified: VerifiedTokens, tapped: Later | None) -> VerifiedTokens:
    """The same with what is tapped of them, worked out now."""
    return verified if tapped is None else verified.with_taps(tapped())


def _within(most: int, sizes: list[int]) -> int:
    """How many of these, from the first on, are ``most`` together; at least one, if there are any."""
    count = sum(total <= most for total in accumulate(sizes))
    return max(count, min(1, len(sizes)))


def _merged(steps: list[tuple[Many[Sequence], Tensor | None]]) -> list[VerifiedTokens]:
    """Steps as one, each sequence's tokens in line."""
    told: list[tuple[int, int, int, int, int]] = []
    first = 0
    for batch, _ in steps:
        for row, sequence in enumerate(batch, first):
            position = sequence.num_computed - sequence.num_untold
            sequence.num_untold -= 1
            if sequence.slot >= 0 and sequence.speculative:
                told.append((sequence.slot, position, sequence.tokens[position], sequence.token_before(position), row))
        first += len(batch)
    if not told:
        return []
    taps = [tapped for _, tapped in steps if tapped is not None]
    device = taps[0].device if taps else None
    slots, positions, token_ids, previous, rows = zip(*sorted(told), strict=True)
    tapped = torch.cat(taps).index_select(0, torch.tensor(rows, device=device)) if taps else None
    return [VerifiedTokens(torch.tensor((token_ids, previous, slots, positions), device=device), tapped)]
