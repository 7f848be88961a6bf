"""What one request adds to the metrics."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import Counter, Histogram

from speculative.request import FinishReason, RequestOutput, RequestStats

POSITIONS: Final = 64
"""Positions of a draft that are told apart: those of the longest draft that a prediction makes."""

FLUSH_S: Final = 0.5
"""Seconds of the engine's clock between two additions to counters: much less than any scraper waits, and many tokens."""


class TokenHistogram(Histogram):
    """A histogram that takes several equal values at once, as one step gives several tokens; prometheus_client's takes one."""

    def observe_equal(self, amount: float, times: int) -> None:
        """The same as ``times`` calls of ``observe(amount)``, in the time of one."""
        self._sum.inc(amount * times)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(times)


@dataclass(frozen=True, slots=True)
class Series:
    """One model's series by metric: looking up a label costs more than counting does."""

    counters: Mapping[str, Counter]
    histograms: Mapping[str, TokenHistogram]
    finished: Mapping[FinishReason, Counter]
    position: Callable[[int], Counter]


class RequestRecorder:
    """Counts what one request does: `output` for each output, `end` once, however it ends.

    On the way only the engine's clock is read, so that a slow client does not look like a slow engine. What is known of the request
    so far stands in ``began`` (seconds of the same monotonic clock), ``stats`` and ``finish_reason``.
    """

    def __init__(self, series: Series) -> None:
        self._series = series
        self._token_latency = series.histograms["inter_token_latency_seconds"]
        self._last_token_time: float | None = None
        self._flushed = RequestStats()
        self._flush_at = 0.0
        self.began = time.monotonic()
        self.stats = RequestStats()
        self.finish_reason: FinishReason = "abort"

    def output(self, output: RequestOutput) -> None:
        """Record a step's gain."""
        stats, now = output.stats, output.stats.last_token_time
        if self.stats.first_token_time is None and stats.first_token_time is not None:
            self._first_token(stats, stats.first_token_time)
        if output.new_token_ids and now is not None:
            if self._last_token_time is not None:
                new_tokens = len(output.new_token_ids)
                self._token_latency.observe_equal((now - self._last_token_time) / new_tokens, new_tokens)
            self._last_token_time = now
        if stats.prompt_tokens:  # an engine that stops says nothing more than that
            self.stats = stats
        if now is not None and now >= self._flush_at:
            self._flush_at = now + FLUSH_S
            self._flush()
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason

    def fail(self) -> None:
        """Note that the request ends by an error."""
        self.finish_reason = "error"

    def end(self) -> None:
        """Record the request as a whole; one that nobody finished was aborted."""
        self._flush()
        stats, histograms = self.stats, self._series.histograms
        self._series.finished[self.finish_reason].inc()
        histograms["e2e_request_latency_seconds"].observe(time.monotonic() - self.began)
        if stats.first_token_time is not None and stats.last_token_time is not None:
            histograms["request_decode_time_seconds"].observe(stats.last_token_time - stats.first_token_time)
            histograms["request_generation_tokens"].observe(stats.completion_tokens)
        if stats.num_drafts:
            histograms["request_acceptance_length"].observe(stats.mean_acceptance_length)
        if stats.num_target_calls:
            histograms["request_target_calls"].observe(stats.num_target_calls)
        if stats.edge is not None:
            histograms["request_server_calls"].observe(stats.edge.num_server_calls)
        if stats.tokens_per_second > 0:
            histograms["request_tokens_per_second"].observe(stats.tokens_per_second)

    def _first_token(self, stats: RequestStats, first_token_time: float) -> None:
        histograms = self._series.histograms
        histograms["time_to_first_token_seconds"].observe(first_token_time - stats.arrival_time)
        histograms["request_prompt_tokens"].observe(stats.prompt_tokens)
        if stats.scheduled_time is not None:
            histograms["request_queue_time_seconds"].observe(stats.scheduled_time - stats.arrival_time)
            histograms["request_prefill_time_seconds"].observe(first_token_time - stats.scheduled_time)

    def _flush(self) -> None:
        """Add to the counters what has come since the last time."""
        stats, before, counters = self.stats, self._flushed, self._series.counters
        if stats is before:
            return
        if not before.prompt_tokens:
            counters["prompt_tokens"].inc(stats.prompt_tokens)
            counters["prefix_cache_queries"].inc(stats.prompt_tokens)
            counters["prefix_cache_hits"].inc(stats.cached_tokens)
        # An edge may take tokens back that it wrote offline.
        counters["generation_tokens"].inc(max(0, stats.completion_tokens - before.completion_tokens))
        counters["spec_decode_num_drafts"].inc(stats.num_drafts - before.num_drafts)
        counters["spec_decode_num_draft_tokens"].inc(stats.num_draft_tokens - before.num_draft_tokens)
        counters["spec_decode_num_accepted_tokens"].inc(stats.num_accepted_draft_tokens - before.num_accepted_draft_tokens)
        counted = accepted_at_least(before)
        for position, count in enumerate(accepted_at_least(stats)):
            if gained := count - (counted[position] if position < len(counted) else 0):
                self._series.position(position).inc(gained)
        self._flushed = stats


def accepted_at_least(stats: RequestStats) -> list[int]:
    """For each position of a draft: verifications that accepted the token there."""
    counts: list[int] = []
    above = 0
    for count in reversed(stats.acceptance_histogram[1:]):
        above += count
        counts.append(above)
    return counts[::-1][:POSITIONS]
