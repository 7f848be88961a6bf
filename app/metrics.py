"""Every metric's name, meaning and unit. All start with ``moaserve_`` and carry ``model_name``; most end as vLLM's do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from speculative.config import EngineStatus
from speculative.errors import EngineError
from speculative.request import FinishReason, RequestOutput, RequestStats

PREFIX: Final = "moaserve_"
LABEL: Final = "model_name"

GAUGES: Final[dict[str, tuple[str, Callable[[EngineStatus], float]]]] = {
    "num_requests_running": ("Requests being decoded now.", lambda status: status.num_running),
    "num_requests_waiting": ("Requests waiting for a slot.", lambda status: status.num_waiting),
    "kv_cache_usage_perc": ("Share of the KV cache in use, 0 to 1.", lambda status: status.kv_cache_usage),
}
COUNTERS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "prompt_tokens": ("Prompt tokens of requests that have begun.", ()),
    "generation_tokens": ("Tokens generated.", ()),
    "request_success": ("Requests ended, by how they ended.", ("finished_reason",)),
    "spec_decode_num_drafts": ("Verifications that carried a draft.", ()),
    "spec_decode_num_draft_tokens": ("Draft tokens verified.", ()),
    "spec_decode_num_accepted_tokens": ("Draft tokens accepted.", ()),
    "spec_decode_num_accepted_tokens_per_pos": ("Draft tokens accepted, by their position in the draft from 0.", ("position",)),
    "session_store_operations": ("Operations of the stores of responses and KV cache.", ("operation", "outcome")),
    "session_store_bytes": ("Bytes that these stores have read and written.", ("direction",)),
}
HISTOGRAMS: Final[dict[str, tuple[str, tuple[float, ...]]]] = {
    "time_to_first_token_seconds": (
        "Seconds from a request's arrival in the engine to its first token.",
        (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
    ),
    "inter_token_latency_seconds": (
        "Seconds from token to token; tokens of one step share its time evenly.",
        (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5),
    ),
    "e2e_request_latency_seconds": (
        "Seconds from submitting a request to its end.",
        (0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480),
    ),
    "request_acceptance_length": (
        "Tokens gained per verification that carried a draft, the bonus token included; a request's mean.",
        (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 10),
    ),
    "request_tokens_per_second": (
        "Tokens per second of a request after its first token.",
        (1, 2, 5, 10, 20, 50, 100, 200, 300, 400, 500, 750, 1000, 2000, 5000),
    ),
    "request_target_calls": (
        "Forward passes of the target that a request took part in.",
        (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000),
    ),
    "session_store_seconds": (
        "Seconds that an operation of the stores of responses and KV cache took.",
        (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
    ),
}
HISTOGRAM_LABELS: Final[dict[str, tuple[str, ...]]] = {"session_store_seconds": ("operation",)}
STORE_UP: Final = ("session_store_up", "1 while Redis can be reached, else 0; without Redis there is none.")


class Metrics:
    """One application's metrics, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.counters = {
            name: Counter(PREFIX + name, text, (LABEL, *labels), registry=self.registry)
            for name, (text, labels) in COUNTERS.items()
        }
        self.histograms = {
            name: Histogram(PREFIX + name, text, (LABEL, *HISTOGRAM_LABELS.get(name, ())), buckets=buckets, registry=self.registry)
            for name, (text, buckets) in HISTOGRAMS.items()
        }

    def watch(self, status: Callable[[], EngineStatus], model_name: Callable[[], str]) -> None:
        """Read the gauges from ``status`` whenever the metrics are scraped."""
        self.registry.register(_Gauges(status, model_name))

    def store_observer(self, model_name: Callable[[], str]) -> StoreRecorder:
        """A recorder for the stores of sessions."""
        recorder = StoreRecorder(self, model_name)
        self.registry.register(recorder)
        return recorder

    def request(self, model_name: str) -> RequestRecorder:
        """A recorder for one request that begins now."""
        return RequestRecorder(self, model_name)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics as text, and its content type, in the format that the scraper asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


class RequestRecorder:
    """Counts what one request does: `output` for each output, `end` once, however it ends."""

    def __init__(self, metrics: Metrics, model_name: str) -> None:
        self._metrics = metrics
        self._model_name = model_name
        self._began = time.perf_counter()
        self._last_token_time: float | None = None
        self._stats = RequestStats()
        self._finish_reason: FinishReason = "abort"

    def output(self, output: RequestOutput) -> None:
        """Record a step's gain; only the engine's clock is read, so that a slow client does not look like a slow engine."""
        stats, new_tokens = output.stats, len(output.new_token_ids)
        if new_tokens:
            self._count("generation_tokens", new_tokens)
        if stats.first_token_time is not None and self._stats.first_token_time is None:
            self._observe("time_to_first_token_seconds", stats.first_token_time - stats.arrival_time)
        if new_tokens and stats.last_token_time is not None:
            if self._last_token_time is not None:
                gap = (stats.last_token_time - self._last_token_time) / new_tokens
                for _ in range(new_tokens):
                    self._observe("inter_token_latency_seconds", gap)
            self._last_token_time = stats.last_token_time
        if self._stats.prompt_tokens == 0:
            self._count("prompt_tokens", stats.prompt_tokens)
        self._stats = stats
        if output.finish_reason is not None:
            self._finish_reason = output.finish_reason

    def fail(self) -> None:
        """Note that the request ends by an error."""
        self._finish_reason = "error"

    def end(self) -> None:
        """Record the request as a whole; one that nobody finished was aborted."""
        stats = self._stats
        self._count("request_success", 1, self._finish_reason)
        self._observe("e2e_request_latency_seconds", time.perf_counter() - self._began)
        self._count("spec_decode_num_drafts", stats.num_drafts)
        self._count("spec_decode_num_draft_tokens", stats.num_draft_tokens)
        self._count("spec_decode_num_accepted_tokens", stats.num_accepted_draft_tokens)
        for position in range(len(stats.acceptance_histogram) - 1):
            accepted = sum(stats.acceptance_histogram[position + 1 :])
            self._count("spec_decode_num_accepted_tokens_per_pos", accepted, str(position))
        if stats.num_drafts:
            self._observe("request_acceptance_length", stats.mean_acceptance_length)
        if stats.num_target_calls:
            self._observe("request_target_calls", stats.num_target_calls)
        if stats.tokens_per_second > 0:
            self._observe("request_tokens_per_second", stats.tokens_per_second)

    def _count(self, name: str, amount: float, *labels: str) -> None:
        self._metrics.counters[name].labels(self._model_name, *labels).inc(amount)

    def _observe(self, name: str, value: float) -> None:
        self._metrics.histograms[name].labels(self._model_name).observe(value)


class StoreRecorder(Collector):
    """Counts what the stores of sessions do: `app.sessions.observing.StoreObserver`. Before the model has a name nothing counts."""

    def __init__(self, metrics: Metrics, model_name: Callable[[], str]) -> None:
        self._metrics, self._model_name = metrics, model_name
        self._is_up: bool | None = None

    def ended(self, operation: str, outcome: str) -> None:
        """Count an operation."""
        self._count("session_store_operations", 1, operation, outcome)

    def took(self, operation: str, seconds: float) -> None:
        """Record how long an operation took."""
        with suppress(EngineError):
            self._metrics.histograms["session_store_seconds"].labels(self._model_name(), operation).observe(seconds)

    def carried(self, direction: str, size: int) -> None:
        """Count bytes."""
        if size:
            self._count("session_store_bytes", size, direction)

    def reachable(self, is_up: bool) -> None:
        """Note whether Redis can be reached."""
        self._is_up = is_up

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The gauge, where there is something to tell."""
        if self._is_up is not None:
            with suppress(EngineError):
                gauge = GaugeMetricFamily(PREFIX + STORE_UP[0], STORE_UP[1], labels=(LABEL,))
                gauge.add_metric((self._model_name(),), self._is_up)
                yield gauge

    def _count(self, name: str, amount: float, *labels: str) -> None:
        with suppress(EngineError):
            self._metrics.counters[name].labels(self._model_name(), *labels).inc(amount)


class _Gauges(Collector):
    def __init__(self, status: Callable[[], EngineStatus], model_name: Callable[[], str]) -> None:
        self._status = status
        self._model_name = model_name

    def collect(self) -> Iterator[GaugeMetricFamily]:
        try:
            model_name, status = self._model_name(), self._status()
        except EngineError:
            return  # nothing to tell before the model has a name
        for name, (text, value) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=(LABEL,))
            gauge.add_metric((model_name,), value(status))
            yield gauge
