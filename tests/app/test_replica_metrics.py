"""What /metrics tells where several engines serve as one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from app.metrics import Metrics
from speculative.config import EngineStatus, ModelInfo, RemoteInfo
from speculative.replicas.messages import ReplicaState
from speculative.replicas.summing import sum_of
from tests.app.fakes import INFO

STATUS = EngineStatus(2, 3, 0.5, num_steps=7, phase_seconds={"verify": 1.5, "draft": 0.5})


def state(status: EngineStatus) -> ReplicaState:
    return ReplicaState("bundled", INFO, RemoteInfo((), 1, {}), status, True, True, 0.25)


@dataclass
class Engines:
    replicas: dict[str, ReplicaState]
    info: ModelInfo = INFO
    num_failovers: int = 4
    num_near: int = 6
    num_placed: int = 10
    ready: bool = True
    alive: bool = True
    busy_seconds: float = 0.0
    asked: list[str] = field(default_factory=list)

    def status(self) -> EngineStatus:
        return sum_of([state.status for state in self.replicas.values()])


def told(engines: Engines) -> dict[str, float]:
    metrics = Metrics()
    metrics.watch(engines, lambda: "tiny")
    text, _ = asyncio.run(metrics.exposition(""))
    lines = (line.rsplit(" ", 1) for line in text.decode().splitlines() if line.startswith("moaserve_") and "tiny" in line)
    return {name: float(value) for name, value in lines}


def test_each_replica_has_its_own_series() -> None:
    series = told(Engines({"a": state(STATUS), "b": state(replace(STATUS, num_running=5, num_steps=9))}))
    assert series['moaserve_num_requests_running{model_name="tiny",replica="a"}'] == 2
    assert series['moaserve_num_requests_running{model_name="tiny",replica="b"}'] == 5
    assert series['moaserve_engine_steps_total{model_name="tiny",replica="b"}'] == 9
    assert series['moaserve_engine_step_seconds_total{model_name="tiny",phase="verify",replica="a"}'] == 1.5
    assert series['moaserve_memory_planned_bytes{model_name="tiny",part="kv_cache",replica="a"}'] == 4096
    assert not any(name.startswith("moaserve_num_requests_running") and "replica" not in name for name in series), "nothing twice"


def test_replicas_failovers_and_placements_are_counted() -> None:
    series = told(Engines({"a": state(STATUS), "b": replace(state(STATUS), ready=False)}))
    assert series['moaserve_replicas{model_name="tiny"}'] == 1
    assert series['moaserve_replica_failovers_total{model_name="tiny"}'] == 4
    assert series['moaserve_replica_placements_total{model_name="tiny",near="true"}'] == 6
    assert series['moaserve_replica_placements_total{model_name="tiny",near="false"}'] == 4


def test_loads_add_up() -> None:
    both = sum_of([STATUS, replace(STATUS, kv_cache_usage=0.1, draft_depth=3)])
    assert (both.num_running, both.num_waiting, both.num_steps, both.draft_depth) == (4, 6, 14, 3)
    assert both.kv_cache_usage == 0.3 and both.phase_seconds == {"verify": 3.0, "draft": 1.0}
    assert sum_of([]) == EngineStatus(0, 0, 0.0)
