"""How much to speculate now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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
    """Chooses the draft shape of a step."""

    def shape(self, batch_size: int) -> DraftShape | None:
        """The shape for ``batch_size`` drafting sequences, or None for no speculation."""


class FixedPolicy:
    """The same shape at every step."""

    def __init__(self, shape: DraftShape) -> None:
        self._shape = shape

    def shape(self, batch_size: int) -> DraftShape | None:
        """The configured shape, whatever the load."""
        return self._shape if batch_size else None
