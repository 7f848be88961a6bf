"""One application's metrics: their series, who records them, and how they are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import anyio.to_thread
from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from app.metric_collectors import EngineCollector, VllmNames
from app.metric_names import (
    COUNTERS,
    ERROR_CODES,
    HISTOGRAM_LABELS,
    HISTOGRAMS,
    LABEL,
    OTHER,
    PREFIX,
    REMOTE_GAUGES,
    STORE_UP,
    Watched,
)
from app.recording import RequestRecorder, Series, TokenHistogram
from app.remote_recording import LABELS as REMOTE_LABELS
from app.remote_recording import RemoteRecorder
from app.store_recording import StoreRecorder
from speculative.errors import EngineError
from speculative.request import FinishReason


@dataclass(frozen=True, slots=True)
class _Read(Collector):
    """Metrics as they were."""

    metrics: list[Metric]

    def collect(self) -> list[Metric]:
        return self.metrics


class Metrics:
    """One application's metrics, in a registry of its own; with ``vllm_names`` those that vLLM has stand there twice."""

    def __init__(self, *, vllm_names: bool = False) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each one, which nobody asks for
        self.registry = CollectorRegistry()
        self.counters = {
            name: Counter(PREFIX + name, text, (LABEL, *labels), registry=self.registry)
            for name, (text, labels) in COUNTERS.items()
        }
        self.histograms = {
            name: TokenHistogram(
                PREFIX + name, text, (LABEL, *HISTOGRAM_LABELS.get(name, ())), buckets=buckets, registry=self.registry
            )
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self._vllm_names = vllm_names
        self._series: dict[str, Series] = {}
        self._model_name: Callable[[], str] = str

    def watch(self, engine: Watched, model_name: Callable[[], str]) -> None:
        """Read the gauges from ``engine`` whenever the metrics are scraped; once there is a name, all other series stand at 0."""
        self._model_name = model_name
        gauges = EngineCollector(engine, model_name)
        self.registry.register(gauges)
        if self._vllm_names:
            self.registry.register(VllmNames([*self.counters.values(), *self.histograms.values(), gauges]))

    def request(self, model_name: str) -> RequestRecorder:
        """A recorder for one request that begins now."""
        return RequestRecorder(self._series_of(model_name))

    def store_observer(self, model_name: Callable[[], str]) -> StoreRecorder:
        """A recorder for the stores of sessions."""
        recorder = StoreRecorder(self.counters, self.histograms, (PREFIX + STORE_UP[0], STORE_UP[1]), model_name)
        self.registry.register(recorder)
        return recorder

    def remote_observer(self, model_name: Callable[[], str]) -> RemoteRecorder:
        """A recorder for what edges do."""
        recorder = RemoteRecorder(self.counters, REMOTE_GAUGES, model_name)
        self.registry.register(recorder)
        return recorder

    def error(self, status: int, code: str) -> None:
        """Count a request that was told an error."""
        if code not in ERROR_CODES:
            code = OTHER
        self.counters["request_errors"].labels(self._name(), str(status), code).inc()

    async def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics as text, and its content type, in the format that the scraper asks for.

        They are read at once, and written in a thread, which takes hundredths of a second.
        """
        if name := self._name():
            self._series_of(name)
        read = _Read(list(self.registry.collect()))
        try:
            encode, content_type = choose_encoder(accept)
            return await anyio.to_thread.run_sync(encode, read), content_type
        except (TypeError, ValueError):  # prometheus_client compares versions that are none, and parts of them that are no numbers
            return await self.exposition("")

    def _name(self) -> str:
        """The model's; empty while it has none, which is as good as no label to Prometheus."""
        try:
            return self._model_name()
        except EngineError:
            return ""

    def _series_of(self, model_name: str) -> Series:
        """A model's series, which are there from now on: rates of what begins at its first event would miss that one."""
        if (known := self._series.get(model_name)) is not None:
            return known
        several = {name: metric for name, metric in self.counters.items() if COUNTERS[name][1]}
        for code, status in ERROR_CODES.items():
            several["request_errors"].labels(model_name, str(status), code)
        for name, labels in REMOTE_LABELS.items():
            for label in labels:
                several[name].labels(model_name, label)
        positions = several["spec_decode_num_accepted_tokens_per_pos"]
        self._series[model_name] = series = Series(
            counters={name: metric.labels(model_name) for name, metric in self.counters.items() if name not in several},
            histograms={
                name: metric.labels(model_name) for name, metric in self.histograms.items() if name not in HISTOGRAM_LABELS
            },
            finished={reason: several["request_success"].labels(model_name, reason) for reason in get_args(FinishReason)},
            position=lambda position: positions.labels(model_name, str(position)),
        )
        return series
