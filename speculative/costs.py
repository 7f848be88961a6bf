"""What the parts of a step cost at each batch size: measured when the engine starts, kept current by every step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

_CURRENT = 0.05
"""Weight of the latest step in what is kept current."""

_OUTLIER = 2.0
"""A step that took so many times what was expected, or as much less, tells of the machine's other work."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A step of ``batch_size`` texts that verified ``nodes`` nodes of each; ``drafted`` tells whether any were asked for.

    ``draft`` are the seconds of drafting, ``rest`` those of verifying and committing; ``told`` were spent before that on telling
    the drafter of steps at which nothing was drafted.
    """

    batch_size: int
    nodes: int
    drafted: bool
    draft: float
    rest: float
    told: float = 0.0


@dataclass(slots=True)
class MeasuredCosts:
    """Seconds that were measured, by batch size.

    ``steps`` are of steps without drafting, by the nodes that were verified of each text; with 0 the drafter is told nothing.
    ``drafts`` are a tree's first level with all that drafting takes besides, and each level below it.
    """

    steps: dict[int, dict[int, float]] = field(default_factory=dict)
    drafts: dict[int, tuple[float, float]] = field(default_factory=dict)


class StepCosts:
    """Expected seconds, between the sizes that were measured and beyond them by straight lines.

    The machine's pace changes and so do the texts' lengths: what steps take is compared with what was expected. Steps that draft
    and those that do not have a factor each, of which a surprise moves its own by twice as much as the other: most of what slows
    one kind slows both, and a kind that has not run for long shall not look cheap for that.
    """

    def __init__(self, measured: MeasuredCosts) -> None:
        self._steps, self._drafts = measured.steps, measured.drafts
        self._factors = {True: 1.0, False: 1.0}
        # Asked at every step, of a few sizes.
        self._step, self._draft = cache(self._step_between), cache(self._draft_between)

    def plain(self, batch_size: int) -> float:
        """A step that drafts nothing."""
        return self._factors[False] * self._step(batch_size, 0)

    def verification(self, batch_size: int, nodes: float) -> float:
        """Verifying so many nodes of each text, and committing what was accepted."""
        return self._factors[True] * self._step(batch_size, round(nodes))

    def draft(self, batch_size: int, levels: float) -> float:
        """A tree of so many levels for each text."""
        first, level = self._draft(batch_size)
        return self._factors[True] * (first + (levels - 1) * level)

    def level(self, batch_size: int) -> float:
        """One more level."""
        return self.draft(batch_size, 2) - self.draft(batch_size, 1)

    def observe(self, step: StepTimes) -> None:
        """A step was taken."""
        expected = self.verification(step.batch_size, step.nodes) if step.drafted else self.plain(step.batch_size)
        surprise = min(max(step.rest / expected, 1 / _OUTLIER), _OUTLIER)
        for kind, factor in self._factors.items():
            weight = _CURRENT * (2 if kind == step.drafted else 1)
            self._factors[kind] = factor * surprise**weight

    def _draft_between(self, batch_size: int) -> tuple[float, float]:
        first, level = ({size: pair[part] for size, pair in self._drafts.items()} for part in (0, 1))
        return _between(first, batch_size), _between(level, batch_size)

    def _step_between(self, batch_size: int, nodes: int) -> float:
        return _between({size: _between(of_size, nodes) for size, of_size in self._steps.items()}, batch_size)


def _between(known: Mapping[int, float], at: float) -> float:
    """The value at a place between known ones, or beyond them as the nearest two say."""
    places = sorted(known)
    if len(places) == 1:
        # All that is known of sizes beyond the only one is that each may cost as much again.
        return known[places[0]] * max(1.0, at / max(1, places[0]))
    right = min(max(bisect_left(places, at), 1), len(places) - 1)
    low, high = places[right - 1], places[right]
    slope = (known[high] - known[low]) / (high - low)
    # A line through two noisy points must not fall to nothing.
    return max(known[low] + slope * (at - low), 0.5 * min(known[low], known[high]))
