"""What is read only when somebody scrapes: the engine's own figures, and vLLM's names for ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.metric_names import EDGE_COUNTERS, EDGE_GAUGES, ENGINE_COUNTERS, GAUGES, INFO, LABEL, MEMORY, PREFIX, VLLM_NAMES, Watched
from speculative.config import EdgeStatus
from speculative.errors import EngineError


class EngineCollector(Collector):
    """What the engine says of itself: gauges, the model's description, and counters that it keeps itself."""

    def __init__(self, engine: Watched, model_name: Callable[[], str]) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """All of it, as it is now; nothing before there is a model."""
        try:
            model_name, info, status = self._model_name(), self._engine.info, self._engine.status()
        except EngineError:
            return  # nothing to tell before there is a model
        for name, (text, value) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=(LABEL,))
            gauge.add_metric((model_name,), value(status, self._engine))
            yield gauge
        yield from self._of_edge(status.edge, model_name)
        described = GaugeMetricFamily(PREFIX + INFO[0], INFO[1], labels=(LABEL, *INFO[2]))
        of_model = (info.drafter, info.dtype, info.device, str(info.max_model_len), version("moaserve"))
        described.add_metric((model_name, *of_model), 1)
        yield described
        memory = GaugeMetricFamily(PREFIX + MEMORY[0], MEMORY[1], labels=(LABEL, *MEMORY[2]))
        for part, size in info.memory.items():
            memory.add_metric((model_name, part), size)
        yield memory
        counted: dict[str, dict[tuple[str, ...], float]] = {
            "engine_steps": {(): status.num_steps},
            "engine_step_seconds": {(phase,): seconds for phase, seconds in status.phase_seconds.items()},
        }
        for name, (text, labels) in ENGINE_COUNTERS.items():
            yield _counter(name, text, labels, model_name, counted[name])

    def _of_edge(self, edge: EdgeStatus | None, model_name: str) -> Iterator[Metric]:
        if edge is None:
            return
        for name, (text, value) in EDGE_GAUGES.items():
            if (number := value(edge)) is not None:
                gauge = GaugeMetricFamily(PREFIX + name, text, labels=(LABEL,))
                gauge.add_metric((model_name,), number)
                yield gauge
        counted: dict[str, dict[tuple[str, ...], float]] = {
            "edge_reconnects": {(): edge.num_reconnects},
            "edge_bytes": {("sent",): edge.bytes_sent, ("received",): edge.bytes_received},
            "edge_offline_tokens": {(): edge.offline_tokens},
            "edge_corrected_tokens": {(): edge.corrected_tokens},
        }
        for name, (text, labels) in EDGE_COUNTERS.items():
            yield _counter(name, text, labels, model_name, counted[name])


def _counter(name: str, text: str, labels: tuple[str, ...], model_name: str, counted: dict[tuple[str, ...], float]) -> Metric:
    counter = CounterMetricFamily(PREFIX + name, text, labels=(LABEL, *labels))
    for values, count in counted.items():
        counter.add_metric((model_name, *values), count)
    return counter


class VllmNames(Collector):
    """The same values under vLLM's names and with its labels, whose ``engine`` numbers the engines of a server: ours is one."""

    def __init__(self, collectors: list[Collector]) -> None:
        self._collectors = collectors

    def collect(self) -> Iterator[Metric]:
        """Those that vLLM has too."""
        for collector in self._collectors:
            for ours in collector.collect():
                name = ours.name.removeprefix(PREFIX)
                if name not in VLLM_NAMES:
                    continue
                theirs = Metric(f"vllm:{name}", ours.documentation, ours.type)
                for sample in ours.samples:
                    suffix = sample.name.removeprefix(ours.name)
                    theirs.add_sample(theirs.name + suffix, {**sample.labels, "engine": "0"}, sample.value)
                yield theirs
