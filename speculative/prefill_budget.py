"""How much of the prompts is read between two steps of the running texts. Arithmetic only, no tensors.

While texts run, a step reads what takes two thirds of what they usually take for a step, so that their next tokens come after about
two steps' time instead of one: what a step fetches anew after reading makes it somewhat longer. Where most of that would go into
running the network at all, however few the tokens, it may be half as long again as a step, and a prompt always gets a few tokens,
so that its first token comes in a time that can be foreseen. For each prompt that waits behind, as much again is read, up to three
steps' worth: without that a server near its capacity has few texts running, many waiting, and both for long. A hundredth of a
second is always allowed, far into a prompt with the texts' own step. When nothing runs, nobody waits, and a step reads as much as
it may.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST = 8
"""Tokens that a prompt gets at every step, whatever they cost."""

_SHARE = 0.65
"""What reading takes beside running texts, in their usual steps."""

_LONGEST = 1.5
"""The longest that reading may take beside running texts, in their usual steps."""

_CROWDED = 3.0
"""The same where other prompts wait behind: they and all that come after them would wait ever longer."""

_UNNOTICED = 0.010
"""Seconds that reading may take beside texts however fast they run: nobody sees them, and prompts that wait keep batches small.
Far into a prompt the texts' own step is among these seconds."""

_FAR = 512
"""From this token of a prompt on, what reading it fetches makes the texts' own step notably longer, and does so many times over."""

_WEIGHT = 0.2
_STEP_WEIGHT = 0.1
_BESIDE_WEIGHT = 0.01
"""The same of a step beside which a prompt was read: it may be longer for that, and streams are used to those without."""

_OUTLIER = 2.0
"""What took so many times as long as expected, or as much less, tells of the machine's other work."""

_LONGER = 1.25
"""What a step counts for at most, in usual ones: one that tries out drafts is not what streams are used to."""


@dataclass(slots=True)
class ReadingCosts:
    """Seconds that reading takes: those of a pass, of each token, and of each token for every position that it may see.

    What reading takes in the end corrects the three, and the one most that most was expected of.
    """

    run: float
    token: float
    position: float

    def seconds(self, start: int, count: int) -> float:
        """Of reading ``count`` tokens behind ``start`` others."""
        return sum(self._parts(start, count))

    def count(self, start: int, seconds: float) -> int:
        """How many tokens behind ``start`` others can be read in so many seconds; 0 where a pass alone takes longer."""
        left = seconds - self.run
        if left <= 0:
            return 0
        # position·n² + linear·n = left, in the form that does not divide by a position's cost of 0.
        linear = self.token + self.position * start
        return int(2 * left / (linear + math.sqrt(linear**2 + 4 * self.position * left)))

    def observe(self, stretches: list[tuple[int, int]], seconds: float) -> None:
        """Reading these stretches, each (start, count), took so long."""
        run, token, position = (sum(parts) for parts in zip(*(self._parts(*stretch) for stretch in stretches), strict=True))
        expected = run + token + position
        surprise = min(max(seconds / expected, 1 / _OUTLIER), _OUTLIER)
        self.run *= surprise ** (_WEIGHT * run / expected)
        self.token *= surprise ** (_WEIGHT * token / expected)
        self.position *= surprise ** (_WEIGHT * position / expected)

    def _parts(self, start: int, count: int) -> tuple[float, float, float]:
        return self.run, count * self.token, count * (start + count) * self.position


class PrefillBudget:
    """What may be read in one step after another, at most ``most`` tokens in each.

    ``costs`` are None where nothing was measured: then only ``most`` counts.
    """

    def __init__(self, most: int, costs: ReadingCosts | None = None) -> None:
        self.most, self.costs = most, costs
        self._usual: dict[int, float] = {}
        self._tokens, self._seconds = most, math.inf
        self._read: list[tuple[int, int]] = []

    def begin(self, num_running: int, num_behind: int = 0) -> None:
        """A step begins, beside which so many texts run; so many prompts wait behind the one that is read next."""
        self._tokens, self._seconds, self._read = self.most, math.inf, []
        if num_running and self.costs is not None:
            # What a step of so many texts takes is not known before the first: at least what one of fewer does.
            key = num_running.bit_length()
            usual = self._usual.get(key) or max((seconds for size, seconds in self._usual.items() if size < key), default=0.0)
            single = min(max(_SHARE * usual, 2 * self.costs.run), _LONGEST * usual)
            self._seconds = max(single, min(_SHARE * (1 + num_behind), _CROWDED) * usual, _UNNOTICED - usual)

    @property
    def left(self) -> bool:
        """Whether another prompt may be begun in this step."""
        return self._tokens > 0 and (not self._read or self._seconds > 0)

    def take(self, start: int, wanted: int) -> int:
        """How many of the next ``wanted`` tokens of a prompt, behind ``start`` others, are to be read now.

        What a step reads first gets ``LEAST`` tokens at any rate. What comes after it may get none.
        """
        most = min(wanted, self._tokens)
        if not self._read and start < _FAR:
            self._seconds = max(self._seconds, _UNNOTICED)
        if self.costs is None or math.isinf(self._seconds):
            count = most
        else:
            count = min(most, self.costs.count(start, self._seconds))
            least = min(most, LEAST)
            if count < least:
                count = 0 if self._read else least
            self._seconds -= self.costs.seconds(start, count) if count else self._seconds
        self._tokens -= count
        if count:
            self._read.append((start, count))
        return count

    def observe_reading(self, seconds: float) -> None:
        """What was taken in this step has been read, in so many seconds."""
        if self._read and self.costs is not None:
            self.costs.observe(self._read, seconds)

    def observe_step(self, num_running: int, seconds: float) -> None:
        """A step of so many texts took so long, without what was read beside it."""
        key = num_running.bit_length()
        usual = self._usual.get(key)
        weight = _BESIDE_WEIGHT if self._read else _STEP_WEIGHT
        self._usual[key] = seconds if usual is None else usual + weight * (min(seconds, _LONGER * usual) - usual)
