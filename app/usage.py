"""What a response cost and how it was made: OpenAI's usage, and the ``metrics`` that are vLLM's extension and ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from pydantic import BaseModel

from speculative.request import RequestStats

_ADDED: Final = (
    "completion_tokens",
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "num_target_calls",
    "num_accepted_prediction_tokens",
    "num_rejected_prediction_tokens",
    "num_reasoning_tokens",
)
"""Numbers of a choice's that are added up over all of them."""


class PromptTokensDetails(BaseModel):
    """How much of the prompt cost nothing."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """What the completion's tokens were spent on; of predictions only where the caller sent one."""

    reasoning_tokens: int
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Usage(BaseModel):
    """Tokens in and out."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, choices: Sequence[RequestStats], n: int) -> Usage:
        """Usage of a response whose every ``n`` choices share a prompt, which counts once."""
        return Totals(choices, n).usage()


class SpeculativeDecoding(BaseModel):
    """What speculation gained; vLLM's names, and ``num_target_calls`` and ``tokens_per_second``.

    ``num_spec_steps`` counts the verifications that carried a draft, ``num_spec_tokens`` the tokens gained in them: the
    accepted ones and a bonus token each. ``mean_acceptance_length`` is the second over the first, or 1.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    num_target_calls: int
    tokens_per_second: float


class Edge(BaseModel):
    """What a response made on an edge has cost its network, and what was written there without a server."""

    num_server_calls: int
    num_calls_ahead: int
    bytes_sent: int
    bytes_received: int
    offline_tokens: int
    corrected_tokens: int


class ResponseMetrics(BaseModel):
    """How a response was made; ``edge`` is there only where that was an edge's."""

    speculative_decoding: SpeculativeDecoding
    edge: Edge | None = None

    @classmethod
    def of(cls, choices: Sequence[RequestStats]) -> ResponseMetrics:
        """Metrics of a whole response, all its choices together."""
        return Totals(choices).metrics()


class Totals:
    """What the choices of a response have cost so far, all together; every ``n`` of them share a prompt, which counts once.

    Only what is new of a choice is counted: a stream can tell the totals with each of its tokens, however many choices it has.
    """

    def __init__(self, choices: Sequence[RequestStats], n: int = 1) -> None:
        self._n = n
        self._uncounted = dict(enumerate(choices))
        self._counted: dict[int, RequestStats] = {}
        self._sums: Counter[str] = Counter()
        self._accepted: Counter[int] = Counter()  # verifications, by the number of draft tokens that each accepted
        self._first: float | None = None
        self._last: float | None = None

    def put(self, index: int, stats: RequestStats) -> None:
        """What a choice has cost by now."""
        self._uncounted[index] = stats

    def usage(self) -> Usage:
        """Tokens in and out."""
        self._count()
        sums = self._sums
        prompt_tokens, completion_tokens = sums["prompt_tokens"], sums["completion_tokens"]
        details = CompletionTokensDetails(reasoning_tokens=sums["num_reasoning_tokens"])
        accepted, rejected = sums["num_accepted_prediction_tokens"], sums["num_rejected_prediction_tokens"]
        if accepted + rejected:
            details.accepted_prediction_tokens, details.rejected_prediction_tokens = accepted, rejected
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sums["cached_tokens"]),
            completion_tokens_details=details,
        )

    def metrics(self) -> ResponseMetrics:
        """How the choices were made."""
        self._count()
        sums = self._sums
        steps, drafted, accepted = sums["num_drafts"], sums["num_draft_tokens"], sums["num_accepted_draft_tokens"]
        metrics = ResponseMetrics(
            speculative_decoding=SpeculativeDecoding(
                mean_acceptance_length=1 + accepted / steps if steps else 1.0,
                draft_acceptance_rate=accepted / drafted if drafted else 0.0,
                acceptance_histogram=[self._accepted[count] for count in range(max(+self._accepted, default=-1) + 1)],
                num_spec_steps=steps,
                num_accepted_draft_tokens=accepted,
                num_draft_tokens=drafted,
                num_spec_tokens=accepted + steps,
                num_target_calls=sums["num_target_calls"],
                tokens_per_second=self._tokens_per_second(),
            )
        )
        if sums["edges"]:
            metrics.edge = Edge(**{name: sums[name] for name in Edge.model_fields})
        return metrics

    def _tokens_per_second(self) -> float:
        """Decode speed of the choices together: their tokens after the first over the time since the first."""
        if len(self._counted) == 1:
            return self._counted[0].tokens_per_second
        elapsed = 0.0 if self._first is None or self._last is None else self._last - self._first
        return self._sums["later_tokens"] / elapsed if elapsed > 0 else 0.0

    def _count(self) -> None:
        turned_back = False
        for index, stats in self._uncounted.items():
            if (before := self._counted.get(index)) is not None:
                self._sums.subtract(self._numbers(index, before))
                self._accepted.subtract(dict(enumerate(before.acceptance_histogram)))
                turned_back = turned_back or _turned_back(before, stats)
            self._sums.update(self._numbers(index, stats))
            self._accepted.update(dict(enumerate(stats.acceptance_histogram)))
            self._counted[index] = stats
        self._take_times(self._counted.values() if turned_back else self._uncounted.values(), turned_back)
        self._uncounted.clear()

    def _numbers(self, index: int, stats: RequestStats) -> dict[str, int]:
        numbers: dict[str, int] = {name: getattr(stats, name) for name in _ADDED}
        numbers["later_tokens"] = max(stats.completion_tokens - 1, 0)
        if index % self._n == 0:
            numbers |= {"prompt_tokens": stats.prompt_tokens, "cached_tokens": stats.cached_tokens}
        if stats.edge is not None:
            numbers |= {name: getattr(stats.edge, name) for name in Edge.model_fields}
            numbers["edges"] = 1
        return numbers

    def _take_times(self, choices: Iterable[RequestStats], anew: bool) -> None:
        if anew:
            self._first = self._last = None
        for stats in choices:
            if (first := stats.first_token_time) is not None:
                self._first = first if self._first is None else min(self._first, first)
            if (last := stats.last_token_time) is not None:
                self._last = last if self._last is None else max(self._last, last)


def _turned_back(before: RequestStats, stats: RequestStats) -> bool:
    """Whether times differ by more than tokens that have come: another replica's clock, by which a text goes on, may do that."""
    if before.first_token_time is None or before.last_token_time is None:
        return False
    later = stats.last_token_time is not None and stats.last_token_time >= before.last_token_time
    return not later or stats.first_token_time != before.first_token_time
