"""What the stores of sessions do, counted: an `app.sessions.observing.StoreObserver`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from speculative.errors import EngineError


class StoreRecorder(Collector):
    """Counts in the metrics whose names begin with ``session_store``; before the model has a name nothing counts.

    ``up`` is the name and the meaning of the gauge that says whether Redis can be reached.
    """

    def __init__(
        self,
        counters: Mapping[str, Counter],
        histograms: Mapping[str, Histogram],
        up: tuple[str, str],
        model_name: Callable[[], str],
    ) -> None:
        self._operations, self._bytes = counters["session_store_operations"], counters["session_store_bytes"]
        self._seconds, self._up, self._model_name = histograms["session_store_seconds"], up, model_name
        self._is_up: bool | None = None

    def ended(self, operation: str, outcome: str) -> None:
        """Count an operation."""
        with suppress(EngineError):
            self._operations.labels(self._model_name(), operation, outcome).inc()

    def took(self, operation: str, seconds: float) -> None:
        """Record how long an operation took."""
        with suppress(EngineError):
            self._seconds.labels(self._model_name(), operation).observe(seconds)

    def carried(self, direction: str, size: int) -> None:
        """Count bytes."""
        if size:
            with suppress(EngineError):
                self._bytes.labels(self._model_name(), direction).inc(size)

    def reachable(self, is_up: bool) -> None:
        """Note whether Redis can be reached."""
        self._is_up = is_up

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The gauge, where there is something to tell."""
        if self._is_up is not None:
            with suppress(EngineError):
                name, text = self._up
                gauge = GaugeMetricFamily(name, text, labels=("model_name",))
                gauge.add_metric((self._model_name(),), self._is_up)
                yield gauge
