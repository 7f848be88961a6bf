"""What edges do, counted: a `speculative.remote.host.Observer`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Final, get_args

from prometheus_client import Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from app.metric_names import LABEL, PREFIX
from speculative.errors import EngineError
from speculative.remote.frames import ErrorCode
from speculative.remote.host import Direction, Verified

LABELS: Final[dict[str, tuple[str, ...]]] = {
    "remote_verifications": get_args(Verified),
    "remote_bytes": get_args(Direction),
    "remote_errors": get_args(ErrorCode),
}
"""Metrics with a label beside the model's name, and all that it can say."""


class RemoteRecorder(Collector):
    """Counts in the metrics whose names begin with ``remote``; before the model has a name nothing counts.

    ``gauges`` has names and meanings of those of sessions and of connections.
    """

    def __init__(
        self,
        counters: Mapping[str, Counter],
        gauges: Mapping[str, str],
        model_name: Callable[[], str],
    ) -> None:
        self._counters, self._gauges, self._model_name = counters, gauges, model_name
        self._series: dict[tuple[str, ...], Counter] = {}
        self._now = dict.fromkeys(gauges, 0)

    def connected(self, change: int) -> None:
        """Count a connection, or count it no more."""
        self._now["remote_connections"] += change

    def session(self, change: int) -> None:
        """The same of a session."""
        self._now["remote_sessions"] += change

    def resumed(self) -> None:
        """Count a session that goes on on another connection."""
        self._add("remote_resumes")

    def verified(self, outcome: Verified) -> None:
        """Count a tree."""
        self._add("remote_verifications", outcome)

    def carried(self, direction: Direction, size: int) -> None:
        """Count bytes."""
        self._add("remote_bytes", direction, amount=size)

    def refused(self, code: str) -> None:
        """Count an error that an edge was told."""
        self._add("remote_errors", code)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The gauges."""
        with suppress(EngineError):
            model_name = self._model_name()
            for name, text in self._gauges.items():
                gauge = GaugeMetricFamily(PREFIX + name, text, labels=(LABEL,))
                gauge.add_metric((model_name,), self._now[name])
                yield gauge

    def _add(self, name: str, *labels: str, amount: int = 1) -> None:
        key = (name, *labels)
        if (series := self._series.get(key)) is None:
            try:
                series = self._series[key] = self._counters[name].labels(self._model_name(), *labels)
            except EngineError:
                return
        series.inc(amount)
