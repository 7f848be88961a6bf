"""What a request's drafts are expected to gain, from how those before them fared."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import accumulate

from speculative.sequence import Sequence

_WEIGHT, _KIND_WEIGHT = 0.15, 0.02
_PRIOR = 3
"""Steps that what is expected of a request counts for when its first draft is judged."""

_FORGOTTEN = 0.03
"""Share of what a request has shown that is forgotten with every step at which nothing is drafted for it."""

_HABIT_WEIGHT = 0.01
"""What a step counts for in what a request is used to: thirty plain ones take a quarter from a new request's share."""

_HOPED = 3.0
"""Tokens that the first draft of all is hoped to gain."""

_TRUST = 2.0
"""Nodes' worth of belief in what other requests say of a new one's drafts."""

_LEAST, _MOST = 0.25, 1.5

_NODE_WEIGHT = 0.05
_NEXT_NODE = 0.75
"""What a node is taken to be worth beside the one before it, as long as nothing was drafted."""


@dataclass(slots=True)
class Record:
    """Of late, by the step: tokens ``gained``, had all nodes been verified, and of the drafts whose probability is known those
    ``promised`` and ``kept``; ``drafting`` is the share of steps that had a draft, those beside prompts left out.
    """

    gained: float
    drafting: float = 1.0
    promised: float = 0.0
    kept: float = 0.0
    count: int = 0

    def add(self, gained: float, promised: float | None, share: float, least_weight: float) -> None:
        """One more, of a draft of which the nodes worth ``share`` were verified; the first ones count for more."""
        self.count += 1
        weight = max(least_weight, 1 / (_PRIOR + self.count))
        self.gained += weight * (gained / share - self.gained)
        if promised is not None:
            self.promised += weight * (promised - self.promised)
            self.kept += weight * (gained - self.kept)

    def get_used(self, drafted: bool) -> None:
        """To a step more, beside which no prompt was read: what reading takes hides the pace of those that have one."""
        self.drafting += _HABIT_WEIGHT * (drafted - self.drafting)

    def reliability(self, otherwise: float) -> float:
        """Tokens kept for each one promised, which is ``otherwise`` as long as little is known."""
        return min(max((self.kept + _TRUST * otherwise) / (self.promised + _TRUST), _LEAST), _MOST)


class Expectations:
    """Of each request, and of all that sample alike for those that are new. Drafts have ``nodes`` nodes at most."""

    def __init__(self, nodes: int) -> None:
        self._requests: dict[str, Record] = {}
        self._kinds: dict[float, Record] = {}
        self._worths = [_NEXT_NODE**node for node in range(1, nodes + 1)]
        self._shares = _shares(self._worths)

    def gain(self, sequence: Sequence) -> float:
        """Draft tokens that a step is expected to have accepted, were all nodes verified."""
        return self._record(sequence).gained

    def share(self, nodes: int) -> float:
        """What part of that so many nodes bring."""
        return self._shares[min(nodes, len(self._shares) - 1)]

    def reliability(self, sequence: Sequence) -> float:
        """Tokens that are accepted for each one that the drafter's probabilities promise."""
        return self._record(sequence).reliability(self._kind(sequence).reliability(1.0))

    def see(self, worths: Many[float]) -> None:
        """What nodes of a step's drafts are worth to a text, the likeliest first; further ones are worth no more than the last."""
        seen = [old + _NODE_WEIGHT * (new - old) for old, new in zip(self._worths, worths, strict=False)]
        self._worths = list(accumulate([*seen, *self._worths[len(seen) :]], min))
        self._shares = _shares(self._worths)

    def observe(self, sequence: Sequence, gained: int, promised: float | None, share: float, *, reading: bool) -> None:
        """A draft gained so many tokens, when nodes worth ``share`` of it were verified; ``reading``: beside a prompt.

        ``promised`` is the sum of these nodes' probabilities, None where they have none.
        """
        record = self._record(sequence)
        record.add(gained, promised, share, _WEIGHT)
        if not reading:
            record.get_used(drafted=True)
        self._kind(sequence).add(gained, promised, share, _KIND_WEIGHT)

    def pass_by(self, sequence: Sequence, *, reading: bool) -> None:
        """A step at which nothing was drafted: what the request has shown says less of what comes, and its kind more."""
        record = self._record(sequence)
        record.gained += _FORGOTTEN * (self._kind(sequence).gained - record.gained)
        if not reading:
            record.get_used(drafted=False)

    def drafting(self, sequences: Many[Sequence]) -> float:
        """The mean of these requests' shares of steps that had a draft, of late and with no prompt read beside: 1 of new ones."""
        return sum(self._record(sequence).drafting for sequence in sequences) / len(sequences)

    @property
    def num_requests(self) -> int:
        """Requests of which something is remembered."""
        return len(self._requests)

    def forget(self, sequence: Sequence) -> None:
        """Its request has ended."""
        self._requests.pop(sequence.request.request_id, None)

    def _record(self, sequence: Sequence) -> Record:
        request_id = sequence.request.request_id
        record = self._requests.get(request_id)
        if record is None:
            record = self._requests[request_id] = Record(self._kind(sequence).gained)
        return record

    def _kind(self, sequence: Sequence) -> Record:
        params = sequence.request.params
        return self._kinds.setdefault(0.0 if params.greedy else round(params.temperature, 1), Record(_HOPED))


def _shares(worths: Many[float]) -> list[float]:
    """What part of all worth 0, 1, 2, … of the nodes have."""
    total = sum(worths) or 1.0
    return [0.0, *(worth / total for worth in accumulate(worths))]
