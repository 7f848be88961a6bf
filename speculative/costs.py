"""What the parts of a step cost at each batch size: measured when the engine starts, kept current by every step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

_CURRENT = 0.05
"""Weight of the latest step in what is kept current."""

_OUTLIER = 2.0
"""A step that took so many times what was expected, or as much less, tells of the machine's other work."""

_SELDOM = 6
"""Steps of the other kind after which one that took less than expected counts for these too: a step can be held up, not hurried."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A step of ``batch_size`` texts that verified ``nodes`` nodes of each; ``drafted`` tells whether any were asked for.

    ``tokens`` is what all texts hold together; ``draft`` are the seconds of drafting, ``rest`` those of verifying and committing;
    ``told`` were spent before that on telling the drafter of steps at which nothing was drafted.
    """

    batch_size: int
    tokens: int
    nodes: int
    drafted: bool
    draft: float
    rest: float
    told: float = 0.0


@dataclass(slots=True)
class MeasuredCosts:
    """Seconds that were measured, by batch size.

    ``steps`` are of steps without drafting, by the nodes that were verified of each text; with 0 the drafter is told nothing.
    ``drafts`` are a tree's first level with all that drafting takes besides, and each level below it. All this is of texts of
    ``length`` tokens; ``tokens`` is what a step takes longer for each token more that texts hold, by the nodes that are verified of
    each text. It is empty where that was not measured. ``prompt`` is what telling the drafter of a text's prompt takes.
    """

    steps: dict[int, dict[int, float]] = field(default_factory=dict)
    drafts: dict[int, tuple[float, float]] = field(default_factory=dict)
    length: int = 0
    tokens: dict[int, float] = field(default_factory=dict)
    prompt: float = 0.0


class StepCosts:
    """Expected seconds, between the sizes that were measured and beyond them by straight lines.

    The machine's pace changes, and a server's steps are slower than those that were measured, of few texts more than of many: what
    steps take is compared with what was expected. Batch sizes, up to the next power of two together, have a factor each for steps
    that draft and for those that do not, of which a surprise moves its own by twice as much as the other: most of what slows one
    kind slows both, and a kind that has not run for long shall not look cheap for that. What the lengths of texts cost is counted
    apart: reading their keys and values takes about as long for one row of a text as for four, and whoever took it for the
    machine's pace would think drafts dear.
    """

    def __init__(self, measured: MeasuredCosts) -> None:
        self._steps, self._drafts = measured.steps, measured.drafts
        self._length, self._tokens = measured.length, measured.tokens
        self._factors: dict[int, dict[bool, float]] = {}
        self._since: dict[int, dict[bool, int]] = {}
        self._token_factor = 1.0
        self._prompt = measured.prompt
        # Asked at every step, of a few sizes.
        self._step, self._draft, self._token = cache(self._step_between), cache(self._draft_between), cache(self._token_between)

    def plain(self, batch_size: int, tokens: int) -> float:
        """A step that drafts nothing, of texts that hold so many ``tokens`` together."""
        rows, lengths = self._parts(batch_size, tokens, 0, drafted=False)
        return rows + lengths

    def verification(self, batch_size: int, tokens: int, nodes: int) -> float:
        """Verifying so many nodes of each text, and committing what was accepted."""
        return self.verifications(batch_size, tokens, (nodes,))[0]

    def verifications(self, batch_size: int, tokens: int, counts: Iterable[int]) -> list[float]:
        """The same for several numbers of nodes: a policy asks for all that it weighs, at every step."""
        pace, further = self._factors_of(batch_size)[True], self._token_factor * self._further(batch_size, tokens)
        step, token = self._step, self._token
        return [pace * step(batch_size, nodes) + further * token(nodes) for nodes in counts]

    def draft(self, batch_size: int, levels: float) -> float:
        """A tree of so many levels for each text."""
        first, level = self._draft(batch_size)
        return self._factors_of(batch_size)[True] * (first + (levels - 1) * level)

    def level(self, batch_size: int) -> float:
        """One more level."""
        return self.draft(batch_size, 2) - self.draft(batch_size, 1)

    def observe(self, step: StepTimes) -> None:
        """A step was taken."""
        rows, lengths = self._parts(step.batch_size, step.tokens, step.nodes, drafted=step.drafted)
        expected = rows + lengths
        surprise = min(max(step.rest / expected, 1 / _OUTLIER), _OUTLIER)
        factors = self._factors_of(step.batch_size)
        since = self._since.setdefault(step.batch_size.bit_length(), {True: 0, False: 0})
        for kind, factor in factors.items():
            own = kind == step.drafted
            counted = 1 + min(since[kind], _SELDOM) if own and surprise < 1 else 1
            weight = _CURRENT * (2 * counted if own else 1)
            factors[kind] = factor * surprise ** (weight * rows / expected)
            since[kind] = 0 if own else since[kind] + 1
        self._token_factor *= surprise ** (_CURRENT * lengths / expected)

    @property
    def prompt(self) -> float:
        """Telling the drafter of a text's prompt, of late."""
        return self._prompt

    def observe_prompt(self, seconds: float) -> None:
        """The drafter was told of one."""
        most = _OUTLIER * self._prompt if self._prompt else seconds
        self._prompt += (2 * _CURRENT if self._prompt else 1.0) * (min(seconds, most) - self._prompt)

    def _parts(self, batch_size: int, tokens: int, nodes: int, *, drafted: bool) -> tuple[float, float]:
        """What rows cost, and what the lengths of texts do."""
        pace, further = self._factors_of(batch_size)[drafted], self._further(batch_size, tokens)
        return pace * self._step(batch_size, nodes), self._token_factor * further * self._token(nodes)

    def _further(self, batch_size: int, tokens: int) -> int:
        """Tokens beyond those of the texts that were measured."""
        return max(0, tokens - batch_size * self._length)

    def _factors_of(self, batch_size: int) -> dict[bool, float]:
        """Of steps that draft (True) and of those that do not."""
        factors = self._factors.get(batch_size.bit_length())
        if factors is None:
            factors = self._factors[batch_size.bit_length()] = {True: 1.0, False: 1.0}
        return factors

    def _draft_between(self, batch_size: int) -> tuple[float, float]:
        first, level = ({size: pair[part] for size, pair in self._drafts.items()} for part in (0, 1))
        return _between(first, batch_size), _between(level, batch_size)

    def _token_between(self, nodes: int) -> float:
        return _between(self._tokens, nodes) if self._tokens else 0.0

    def _step_between(self, batch_size: int, nodes: int) -> float:
        return _between({size: _between(of_size, nodes) for size, of_size in self._steps.items()}, batch_size)


def doubling(most: int) -> Iterator[int]:
    """1, 2, 4, … and ``most``: what is measured and asked for, where costs change little in between."""
    size = 1
    while size < most:
        yield size
        size *= 2
    yield most


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
