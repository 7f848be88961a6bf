"""As much speculation as pays: by what steps cost, and by how the drafts of each request have fared."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import accumulate
from math import inf, isnan

from speculative.costs import StepCosts, StepTimes, doubling
from speculative.expectations import Expectations
from speculative.policy import DraftShape
from speculative.sequence import Sequence
from speculative.tree import DraftTree

PROBING = 0.005
"""Share of the time that may be lost on finding out whether drafts have come to pay."""

_MOST_PASSES = 8
"""Steps of the same texts for which it is decided at once that nothing is drafted: deciding takes a hundredth of a small step."""

_MOSTLY = 0.75
"""Share of texts' latest steps that must have drafted for drafts to go on beside a prompt that is read."""

_BETWEEN = 16
"""Steps that draft, at least, before one that does not shows what those take by now."""

_CLOSE = 1.5
"""Times the rate of plain steps up to which drafts are compared with them: more is no error of what these were taken to cost."""

_ANSWER, _ANSWER_WEIGHT = 64, 0.05
"""Tokens that answers are taken to have before there were any, and what the latest counts for."""

_WEIGHT = 0.1
_LEVELS, _NODES = 3, 4
"""What drafts are taken to be before there were any."""

_GOES_ON = 0.75
"""Of what reaches a level, the share that the level below it can gain."""

_NODES_ABREAST = 4
"""Nodes that are aimed at for each that a level is drafted wide (docs/results/adaptive-policy.md)."""


@dataclass(slots=True)
class _Usual:
    """Of a batch of some size: seconds that drafting takes of late, by the nodes that are aimed at; how many a draft has that is
    not cut; how long the drafter took to be ready again after nothing had been drafted; and how many steps drafted since the latest
    that did not.
    """

    drafts: dict[int, float]
    nodes: float = _NODES
    told: float = 0.0
    drafted: int = 0


@dataclass(slots=True)
class _Passes:
    """Steps, of ``size`` texts of which ``last`` came last, for which it has been decided that nothing is drafted.

    One that comes and one that ends change these.
    """

    left: int
    last: Sequence
    size: int
    seconds: float

    def go_on(self, batch: Many[Sequence]) -> bool:
        """Whether this step is one of them, which is one less then."""
        self.left -= 1
        return self.left >= 0 and len(batch) == self.size and batch[-1] is self.last


class AdaptivePolicy:
    """The trees that make the most tokens a second, or none where that is plain decoding.

    A step gains G tokens of all texts and takes T seconds. What is added to it, worth g tokens for t seconds, makes
    (G + g) / (T + t) larger than G / T exactly if g / t > G / T, the rate that there is anyway. So

    - nothing is drafted where the best rate that drafts are expected to bring, with as many nodes as that takes, is below that of
      plain decoding,
    - another level is drafted while it is expected to gain more than the rate times its seconds, with those of verifying a node,
    - where few nodes are worth it, trees are narrow and shallow (``narrows``: the drafter spends less on these),
    - and of the nodes that were drafted as many are verified as make the most of the step: by the drafter's probabilities, as far
      as each request's drafts have kept what those promised, and by what rows cost at this batch size.

    Prompts that are read beside steps do not count: how long that takes is the same whether steps draft or not, so that texts end
    the sooner the faster the steps themselves are. What does count is telling the drafter of them: each token of an answer bears
    its share, as on a busy server a text that ends is followed by another; and where nothing has been drafted of late, a share of
    telling it what it has missed of all.

    While texts are drafted for nobody learns what plain steps take by now: a few are taken where those might be as fast.
    While nothing is drafted nobody learns whether drafts would pay by now, or what they cost where that was measured in a busy
    minute: half a hundredth of the time may be lost on trying. A trial holds all texts up: it waits while a prompt is read, which
    does so too, and verifies what goes into twice a plain step's time, a node at least.
    Where texts have mostly had plain steps of late, drafts that would pay wait for that as well: their steps make more tokens and
    take longer, and texts that are used to the pace of plain ones would wait for such a step and the reading together. Texts that
    are new, or had prompts read beside them all along, are not.
    """

    def __init__(self, largest: DraftShape, costs: StepCosts, *, narrows: bool = False) -> None:
        self.largest, self.costs = largest, costs
        self._narrows = narrows
        self.expected = Expectations(largest.nodes)
        self._usual: dict[int, _Usual] = {}
        self._allowance = 0.0
        self._answer = float(_ANSWER)
        self._missed = 0
        self._passes: _Passes | None = None
        self._trying = False
        self._reading = False
        self._cuts = True
        self._aim = largest.nodes

    def shape(self, batch: Many[Sequence], *, reading: bool = False) -> DraftShape | None:
        """As in SpeculationPolicy."""
        self._reading = reading
        drafting = [sequence for sequence in batch if sequence.drafts_here]
        if not drafting:
            return None
        if self._passes is not None and self._passes.go_on(batch):
            self._pass_by(drafting, self._passes.seconds)
            return None
        self._passes = None
        size, tokens = len(batch), _tokens(batch)
        plain = self.costs.plain(size, tokens)
        adaptive = all(sequence.request.adaptive for sequence in drafting)
        if adaptive and reading and self.expected.drafting(drafting) < _MOSTLY:
            self._pass_by(drafting, plain)
            return None
        gain = sum(self.expected.gain(sequence) for sequence in drafting)
        rate, seconds, self._aim = max(self._rates(size, tokens, gain))
        self._trying = adaptive and rate * plain < size
        if self._trying:
            loss = self._unready(size) + seconds * (1 - rate * plain / size)
            missing = loss - self._allowance - PROBING * plain
            if missing > 0 or reading:
                self._pass_by(drafting, plain)
                self._passes = _Passes(min(int(missing / (PROBING * plain)), _MOST_PASSES), batch[-1], size, plain)
                return None
            self._allowance += PROBING * plain
        elif adaptive and self._compares(size, plain, rate, seconds):
            return None
        return self._shape(size, tokens, rate / sum(self.expected.reliability(sequence) for sequence in drafting))

    def _compares(self, size: int, plain: float, rate: float, seconds: float) -> bool:
        """Whether to see what a plain step takes by now, where drafts, steps of so many seconds, are not much faster.

        It may lose the share of the time that trials may.
        """
        drafted = self._of(size).drafted
        if drafted < _BETWEEN or not size < rate * plain < _CLOSE * size:
            return False
        return plain - size / rate <= PROBING * drafted * seconds

    def _pass_by(self, drafting: list[Sequence], plain: float) -> None:
        """Nothing is drafted in a step that is expected to take so many seconds."""
        self._allowance += PROBING * plain
        for sequence in drafting:
            self.expected.pass_by(sequence, reading=self._reading)

    def _unready(self, size: int) -> float:
        """Seconds until the drafter has been told what it has missed of so many texts."""
        return 0.0 if self._missed <= 1 else self._of(size).told or size * self.costs.prompt

    def _rates(self, size: int, tokens: int, gain: float) -> Iterator[tuple[float, float, int]]:
        """What drafts are expected to bring with some numbers of nodes: tokens a second, seconds of a step, nodes."""
        usual, share = self._of(size), self.expected.share
        telling = (self.costs.prompt + self._unready(size) / size) / self._answer
        if self._cuts:
            verifications = self.costs.verifications(size, tokens, usual.drafts)
            kinds = [
                (nodes, verification, gain * share(nodes)) for nodes, verification in zip(usual.drafts, verifications, strict=True)
            ]
        else:  # a draft has as many nodes as it comes with, whatever is aimed at
            kinds = [(self.largest.nodes, self.costs.verification(size, tokens, round(usual.nodes)), gain)]
        for nodes, verification, accepted in kinds:
            gained = size + accepted
            seconds = usual.drafts[nodes] + verification + telling * gained
            yield gained / seconds, seconds, nodes

    def _shape(self, size: int, tokens: int, worth: float) -> DraftShape:
        """Limits with which as many nodes are drafted as are aimed at, where a second is ``worth`` so many nodes of all texts."""
        largest, nodes = self.largest, self._aim
        breadth = min(largest.breadth, -(-nodes // _NODES_ABREAST)) if self._narrows else largest.breadth
        one, more = self.costs.verifications(size, tokens, (nodes, nodes + 1))
        reach = worth * (self.costs.level(size) + max(0.0, more - one)) / _GOES_ON
        depth = min(largest.depth, nodes) if self._narrows else largest.depth
        least = min(max(largest.min_reach, reach), 1.0)
        return DraftShape(depth, breadth, largest.nodes, least, largest.temperature, largest.min_probability)

    def cut(self, tree: DraftTree, batch: Many[Sequence]) -> DraftTree:
        """As in SpeculationPolicy; what drafters that give no probabilities propose stays as it is."""
        nodes = tree.num_rows - 1
        if not nodes:
            return tree
        probabilities = tree.probability_lists
        self._cuts = probabilities is not None
        if probabilities is None or any(tree.straight):
            return tree
        size, tokens, draft = len(batch), _tokens(batch), self._of(len(batch)).drafts[self._aim]
        worths = self._worths(probabilities, tree.sizes, batch)
        best, count = 0.0, 0
        # Without a node a trial would show that drafts gain nothing.
        least, longest = (1, 2 * self.costs.plain(size, tokens)) if self._trying else (0, inf)
        verifications = self.costs.verifications(size, tokens, range(nodes + 1))
        for number, (gain, verification) in enumerate(zip(accumulate(worths, initial=0.0), verifications, strict=True)):
            rate = (size + gain) / (draft + verification)
            if number >= least and rate > best and (number <= 1 or draft + verification <= longest):
                best, count = rate, number
        return tree.cut(count) if count < nodes else tree

    def _worths(self, probabilities: Many[list[float]], sizes: Many[int], batch: Many[Sequence]) -> list[float]:
        """Tokens that each node, of all texts together, is expected to bring; those whose probability is not known count as sure.

        ``probabilities`` [B, N]. In plain Python: for so few numbers PyTorch's operations take longer than a drafted level.
        """
        width = len(probabilities[0])
        promised, sure, texts = [0.0] * width, [0] * width, 0
        for sequence, size, nodes in zip(batch, sizes, probabilities, strict=True):
            if not sequence.drafts_here:
                continue
            if isnan(nodes[0]):
                sure[:size] = [count + 1 for count in sure[:size]]
            else:
                texts, kept = texts + 1, self.expected.reliability(sequence)
                promised = [worth + kept * node for worth, node in zip(promised, nodes, strict=True)]
        if texts:
            self.expected.see([worth / texts for worth in promised])
        return [worth + count for worth, count in zip(promised, sure, strict=True)]

    def observe(self, step: StepTimes, tree: DraftTree, batch: Many[Sequence], gained: Many[int]) -> None:
        """As in SpeculationPolicy."""
        self.costs.observe(step)
        usual = self._of(step.batch_size)
        if not step.drafted:
            self._missed += 1
            usual.drafted = 0
            return
        missed, self._missed = self._missed, 0
        usual.drafted += 1
        self._passes = None
        if self._trying:
            # What it has lost, not what it was expected to: where drafts pay the next trial need not wait.
            worth = self.costs.plain(step.batch_size, step.tokens) * (1 + sum(gained) / step.batch_size)
            self._allowance = max(0.0, self._allowance - max(0.0, step.told + step.draft + step.rest - worth))
        draft = usual.drafts[self._aim]
        usual.drafts[self._aim] += _WEIGHT * (min(step.draft, 2 * draft) - draft)
        usual.nodes += _WEIGHT * (step.nodes - usual.nodes)
        if step.told and missed > 1:  # after a single one that was taken for comparison there is little to tell
            usual.told += (_WEIGHT if usual.told else 1.0) * (step.told - usual.told)
        share = self.expected.share(max(1, step.nodes)) if self._cuts else 1.0
        known_of = tree.probability_lists
        promised = [None] * len(batch) if known_of is None else map(sum, known_of)
        for sequence, tokens, promise, drafted in zip(batch, gained, promised, tree.sizes, strict=True):
            if sequence.drafts_here:
                known = promise is not None and not isnan(promise) and drafted
                self.expected.observe(sequence, tokens, promise if known else None, share if known else 1.0, reading=self._reading)
                if sequence.finish_reason is not None:  # it was forgotten as it ended, before this was known
                    self.expected.forget(sequence)

    def observe_prompt(self, seconds: float) -> None:
        """As in SpeculationPolicy."""
        self.costs.observe_prompt(seconds)

    def forget(self, sequence: Sequence) -> None:
        """As in SpeculationPolicy."""
        self.expected.forget(sequence)
        if sequence.drafts_here and (tokens := len(sequence.tokens) - sequence.num_prompt_tokens) > 0:
            self._answer += _ANSWER_WEIGHT * (tokens - self._answer)

    def _of(self, batch_size: int) -> _Usual:
        """Batch sizes up to the next power of two are taken together."""
        known = self._usual.get(batch_size.bit_length())
        if known is None:
            most = min(_LEVELS, self.largest.depth)
            drafts = {nodes: self.costs.draft(batch_size, min(nodes, most)) for nodes in _sizes(self.largest.nodes)}
            known = self._usual[batch_size.bit_length()] = _Usual(drafts)
        return known


def _sizes(most: int) -> list[int]:
    """Numbers of nodes that are weighed: 1, 2, 3, 4, 6, 8, 12, … and ``most``."""
    powers = list(doubling(most))
    return sorted({*powers, *(3 * power // 2 for power in powers[1:-1] if 3 * power // 2 < most)})


def _tokens(batch: Many[Sequence]) -> int:
    """What these texts hold together."""
    return sum(sequence.num_computed for sequence in batch)
