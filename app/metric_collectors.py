"""What is read only when somebody scrapes: the engine's own figures, and vLLM's names for ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Protocol, runtime_checkable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.metric_names import (
    EDGE_COUNTERS,
    EDGE_GAUGES,
    ENGINE_COUNTERS,
    GAUGES,
    INFO,
    LABEL,
    MEMORY,
    PREFIX,
    REPLICA_COUNTERS,
    REPLICA_GAUGE,
    REPLICA_LABEL,
    VLLM_NAMES,
    Watched,
)
from speculative.config import EdgeStatus, EngineStatus, ModelInfo
from speculative.errors import EngineError
from speculative.replicas.messages import ReplicaState

ENGINE_UP = "engine_up"
VERSION = version("moaserve")
"""Read once: a scrape must not need files, of which there may be no more to open."""


@runtime_checkable
class Several(Protocol):
    """What is told of several engines that serve as one: `speculative.replicas.engine.ReplicatedEngine`."""

    num_failovers: int
    num_near: int
    num_placed: int

    @property
    def replicas(self) -> Mapping[str, ReplicaState]:
        """Each of them."""

    @property
    def info(self) -> ModelInfo:
        """The model; raises EngineNotReadyError before there is one."""


@dataclass(frozen=True, slots=True)
class _Replica:
    """A replica as it was when last asked."""

    state: ReplicaState

    @property
    def ready(self) -> bool:
        return self.state.ready

    @property
    def alive(self) -> bool:
        return self.state.alive

    @property
    def busy_seconds(self) -> float:
        return self.state.busy_seconds

    @property
    def info(self) -> ModelInfo:
        return self.state.info

    def status(self) -> EngineStatus:
        return self.state.status


@dataclass(frozen=True, slots=True)
class _Told:
    """One engine: the labels beside the model's name, how busy it is, and itself."""

    labels: tuple[str, ...]
    status: EngineStatus
    engine: Watched


class EngineCollector(Collector):
    """What the engine says of itself: gauges, the model's description, and counters that it keeps itself."""

    def __init__(self, engine: Watched, model_name: Callable[[], str]) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """All of it, as it is now; before there is a model nothing, or that there will be none."""
        try:
            model_name, _, told = self._model_name(), self._engine.info, self._told()
        except EngineError:
            if not self._engine.alive:
                yield _gone()
            return
        more = (REPLICA_LABEL,) if isinstance(self._engine, Several) else ()
        for name, (text, value) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=(LABEL, *more))
            for each in told:
                gauge.add_metric((model_name, *each.labels), value(each.status, each.engine))
            yield gauge
        yield from self._of_edge(self._engine.status().edge, model_name)
        described = GaugeMetricFamily(PREFIX + INFO[0], INFO[1], labels=(LABEL, *more, *INFO[2]))
        memory = GaugeMetricFamily(PREFIX + MEMORY[0], MEMORY[1], labels=(LABEL, *more, *MEMORY[2]))
        for each in told:
            info = each.engine.info
            of_model = (info.drafter, info.dtype, info.device, str(info.max_model_len), VERSION)
            described.add_metric((model_name, *each.labels, *of_model), 1)
            for part, size in info.memory.items():
                memory.add_metric((model_name, *each.labels, part), size)
        yield described
        yield memory
        for name, (text, labels) in ENGINE_COUNTERS.items():
            counted: dict[tuple[str, ...], float] = {}
            for each in told:
                status = each.status
                steps: dict[tuple[str, ...], float] = {(): status.num_steps}
                seconds: dict[tuple[str, ...], float] = {(phase,): value for phase, value in status.phase_seconds.items()}
                of_engine = {"engine_steps": steps, "engine_step_seconds": seconds}[name]
                counted |= {(*each.labels, *values): count for values, count in of_engine.items()}
            yield _counter(name, text, (*more, *labels), model_name, counted)
        if isinstance(self._engine, Several):
            yield from self._of_replicas(self._engine, model_name)

    def _told(self) -> list[_Told]:
        engine = self._engine
        if isinstance(engine, Several):
            return [_Told((name,), state.status, _Replica(state)) for name, state in sorted(engine.replicas.items())]
        return [_Told((), engine.status(), engine)]

    def _of_replicas(self, engine: Several, model_name: str) -> Iterator[Metric]:
        gauge = GaugeMetricFamily(PREFIX + REPLICA_GAUGE[0], REPLICA_GAUGE[1], labels=(LABEL,))
        gauge.add_metric((model_name,), sum(state.ready for state in engine.replicas.values()))
        yield gauge
        counted: dict[str, dict[tuple[str, ...], float]] = {
            "replica_failovers": {(): engine.num_failovers},
            "replica_placements": {("true",): engine.num_near, ("false",): engine.num_placed - engine.num_near},
        }
        for name, (text, labels) in REPLICA_COUNTERS.items():
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


def _gone() -> Metric:
    """That an engine has ended which has loaded no model, and so has no name to tell it by."""
    text, _ = GAUGES[ENGINE_UP]
    gauge = GaugeMetricFamily(PREFIX + ENGINE_UP, text, labels=(LABEL,))
    gauge.add_metric(("",), 0)
    return gauge


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
