"""How much to speculate now."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf, isnan
from typing import Protocol

from torch import Tensor

from speculative.costs import StepCosts, StepTimes
from speculative.expectations import Expectations
from speculative.sequence import Sequence
from speculative.tree import DraftTree

PROBING = 0.005
"""Share of the time that may be lost on finding out whether drafts have come to pay."""

_WEIGHT = 0.1
_LEVELS, _NODES = 3, 4
"""What drafts are taken to be before there were any."""


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

    def shape(self, batch: Many[Sequence], *, read: float = 0.0) -> DraftShape | None:
        """Limits of this step's trees, or None where nothing is to be drafted; it has read a prompt for ``read`` seconds already.

        ``read`` is 0 where other prompts wait behind that one.

        The drafter may have to be told what it has missed, a portion between two steps: then the same is asked again.
        """

    def cut(self, tree: DraftTree, batch: Many[Sequence]) -> DraftTree:
        """As much of what was drafted as is to be verified."""

    def observe(self, step: StepTimes, tree: DraftTree, batch: Many[Sequence], gained: Many[int]) -> None:
        """A step was taken, and so many draft tokens of each sequence were accepted."""

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""


class FixedPolicy:
    """The same shape at every step."""

    def __init__(self, shape: DraftShape) -> None:
        self._shape = shape

    def shape(self, batch: Many[Sequence], *, read: float = 0.0) -> DraftShape | None:
        """The configured shape, whatever the load."""
        return self._shape if any(sequence.drafts_here for sequence in batch) else None

    def cut(self, tree: DraftTree, batch: Many[Sequence]) -> DraftTree:
        """All of it."""
        return tree

    def observe(self, step: StepTimes, tree: DraftTree, batch: Many[Sequence], gained: Many[int]) -> None:
        """Nothing to learn."""

    def forget(self, sequence: Sequence) -> None:
        """Nothing to forget."""


@dataclass(slots=True)
class _Usual:
    """What drafting for a batch of some size takes of late, in seconds, how many nodes are verified of each text, and how long the
    drafter took to be ready again after nothing had been drafted.
    """

    draft: float
    nodes: float
    told: float = 0.0


class AdaptivePolicy:
    """The trees that make the most tokens a second, or none where that is plain decoding.

    A step gains G tokens of all texts and takes T seconds. What is added to it, worth g tokens for t seconds, makes
    (G + g) / (T + t) larger than G / T exactly if g / t > G / T, the rate that there is anyway. So

    - nothing is drafted where the expected rate is below that of plain decoding,
    - another level is drafted while it is reached more often than the rate times its seconds,
    - and of the nodes that were drafted as many are verified as make the most of the step: by the drafter's probabilities, as far
      as each request's drafts have kept what those promised, and by what rows cost at this batch size.

    Prompts are read for some time beside a step, whether it drafts or not. It belongs to the step: the longer it is, the more a
    draft's tokens are worth beside what drafting takes longer. Whether to draft goes by how long steps read of late, not by this
    one: at every change back the drafter must be told what it missed, and near capacity a prompt begins or ends every few steps.

    While nothing is drafted nobody learns whether drafts would pay by now: half a hundredth of the time goes into trying. A trial
    holds all texts up: it waits while a prompt is read, which does so too, and verifies what goes into twice a plain step's time.
    """

    def __init__(self, largest: DraftShape, costs: StepCosts) -> None:
        self.largest, self.costs = largest, costs
        self.expected = Expectations()
        self._usual: dict[int, _Usual] = {}
        self._allowance = 0.0
        self._trying = False
        self._read = self._usual_read = 0.0

    def shape(self, batch: Many[Sequence], *, read: float = 0.0) -> DraftShape | None:
        """As in SpeculationPolicy."""
        self._read = read
        self._usual_read += _WEIGHT * (read - self._usual_read)
        drafting = [sequence for sequence in batch if sequence.drafts_here]
        if not drafting:
            return None
        size, costs, usual = len(batch), self.costs, self._of(len(batch))
        plain = self._usual_read + costs.plain(size)
        seconds = self._usual_read + usual.draft + costs.verification(size, usual.nodes)
        gain = sum(self.expected.gain(sequence) for sequence in drafting)
        rate = (size + gain) / seconds
        self._trying = rate * plain < size and all(sequence.request.adaptive for sequence in drafting)
        if self._trying:
            self._allowance += PROBING * plain
            loss = usual.told + seconds - plain * (size + gain) / size
            if self._allowance < loss or read:
                for sequence in drafting:
                    self.expected.pass_by(sequence)
                return None
        level = costs.level(size)
        reliability = sum(self.expected.reliability(sequence) for sequence in drafting)
        return replace(self.largest, min_reach=min(max(self.largest.min_reach, rate * level / reliability), 1.0))

    def cut(self, tree: DraftTree, batch: Many[Sequence]) -> DraftTree:
        """As in SpeculationPolicy; what drafters that give no probabilities propose stays as it is."""
        nodes = tree.num_rows - 1
        if tree.probabilities is None or not nodes or any(tree.straight):
            return tree
        size, usual = len(batch), self._of(len(batch))
        worth = accumulate(self._worth(tree.probabilities, batch))
        best, count = 0.0, 0
        longest = 2 * self.costs.plain(size) if self._trying else inf
        for number, gain in enumerate((0.0, *worth)):
            verification = self.costs.verification(size, number)
            rate = (size + gain) / (self._read + usual.draft + verification)
            if rate > best and (number <= 1 or usual.draft + verification <= longest):
                best, count = rate, number
        usual.nodes += _WEIGHT * (count - usual.nodes)
        return tree.cut(count) if count < nodes else tree

    def _worth(self, probabilities: Tensor, batch: Many[Sequence]) -> Iterator[float]:
        """Tokens that each node, of all texts together, is expected to bring; one whose probability is not known counts as sure.

        ``probabilities`` [B, N]. In plain Python: for so few numbers PyTorch's operations take longer than a drafted level.
        """
        reliability = [self.expected.reliability(sequence) * sequence.drafts_here for sequence in batch]
        for node in zip(*probabilities.tolist(), strict=True):
            yield sum(1.0 if isnan(each) else each * kept for each, kept in zip(node, reliability, strict=True))

    def observe(self, step: StepTimes, tree: DraftTree, batch: Many[Sequence], gained: Many[int]) -> None:
        """As in SpeculationPolicy."""
        self.costs.observe(step)
        if not step.drafted:
            return
        if self._trying:
            self._allowance = 0.0
        usual = self._of(step.batch_size)
        usual.draft += _WEIGHT * (min(step.draft, 2 * usual.draft) - usual.draft)
        if step.told:
            usual.told += (_WEIGHT if usual.told else 1.0) * (step.told - usual.told)
        promised = [None] * len(batch) if tree.probabilities is None else tree.probabilities.sum(dim=1).tolist()
        for sequence, tokens, promise, drafted in zip(batch, gained, promised, tree.sizes, strict=True):
            if sequence.drafts_here:
                self.expected.observe(sequence, tokens, None if promise is None or promise != promise or not drafted else promise)

    def forget(self, sequence: Sequence) -> None:
        """As in SpeculationPolicy."""
        self.expected.forget(sequence)

    def _of(self, batch_size: int) -> _Usual:
        """Batch sizes up to the next power of two are taken together."""
        known = self._usual.get(batch_size.bit_length())
        if known is None:
            draft = self.costs.draft(batch_size, min(_LEVELS, self.largest.depth))
            known = self._usual[batch_size.bit_length()] = _Usual(draft, min(_NODES, self.largest.nodes))
        return known
