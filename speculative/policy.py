"""How much to speculate now: what chooses that, and the choice that is always the same."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

from speculative.costs import StepTimes
from speculative.sequence import Sequence
from speculative.tree import DraftTree


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Limits of the trees of one step: levels drafted, nodes kept per level, nodes verified.

    Drafting stops early once the drafter gives all paths it has kept of a sequence, together, a probability below ``min_reach``
    (the mean over the batch): another level costs the same however rarely it is reached. Its logits are divided by ``temperature``
    first: what matters is which token the target will choose, and a drafter that was taught how the target samples is less sure
    of that than it could be. Of the nodes that were drafted those are kept whose paths have at least the probability
    ``min_probability``.
    """

    depth: int
    breadth: int
    nodes: int
    min_reach: float = 0.0
    temperature: float = 1.0
    min_probability: float = 0.0


class SpeculationPolicy(Protocol):
    """Chooses how each step drafts, and learns from what came of it."""

    def shape(self, batch: Many[Sequence], *, reading: bool = False) -> DraftShape | None:
        """Limits of this step's trees, or None where nothing is to be drafted; ``reading``: a prompt is read beside it.

        The drafter may have to be told what it has missed, a portion between two steps: then the same is asked again.
        """

    def cut(self, tree: DraftTree, batch: Many[Sequence]) -> DraftTree:
        """As much of what was drafted as is to be verified."""

    def observe(self, step: StepTimes, tree: DraftTree, batch: Many[Sequence], gained: Many[int]) -> None:
        """A step was taken, and so many draft tokens of each sequence were accepted."""

    def observe_prompt(self, seconds: float) -> None:
        """The drafter was told of a text's prompt, because texts are drafted for."""

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""


class FixedPolicy:
    """The same shape at every step."""

    def __init__(self, shape: DraftShape) -> None:
        self._shape = shape

    def shape(self, batch: Many[Sequence], *, reading: bool = False) -> DraftShape | None:
        """The configured shape, whatever the load."""
        return self._shape if any(sequence.drafts_here for sequence in batch) else None

    def cut(self, tree: DraftTree, batch: Many[Sequence]) -> DraftTree:
        """All of it."""
        return tree

    def observe(self, step: StepTimes, tree: DraftTree, batch: Many[Sequence], gained: Many[int]) -> None:
        """Nothing to learn."""

    def observe_prompt(self, seconds: float) -> None:
        """Nor of this."""

    def forget(self, sequence: Sequence) -> None:
        """Nothing to forget."""
