"""How many replicas are wanted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from app.cluster.autoscaling import wanted, wanted_replicas


@pytest.mark.parametrize(
    ("current", "running", "waiting", "kv", "count"),
    [
        (2, 0, 0, 0.0, 1),
        (2, 16, 0, 0.1, 3),  # 16 of 8 slots a replica, used to 0.8: 2.5
        (2, 16, 16, 0.1, 5),
        (2, 4, 0, 0.9, 3),  # long texts: slots are free, caches are not
        (2, 4, 4, 0.7, 4),  # what waits will want as much
    ],
)
def test_slots_and_caches_both_count(current: int, running: int, waiting: int, kv: float, count: int) -> None:
    assert wanted(current, running, waiting, slots=8, kv=kv, target=0.8) == count


def context(metrics: dict[str, dict[str, float]]) -> SimpleNamespace:
    return SimpleNamespace(
        aggregated_metrics=metrics,
        target_num_replicas=2,
        policy_state={"kept": 1},
        config=SimpleNamespace(target_ongoing_requests=6.4),
        total_queued_requests=0,
    )


def test_the_policy_reads_what_replicas_tell() -> None:
    told = {
        "running": {"a": 8.0, "b": 8.0},
        "waiting": {"a": 10.0, "b": 6.0},
        "slots": {"a": 8.0, "b": 8.0},
        "kv": {"a": 0.1, "b": 0.1},
    }
    assert wanted_replicas(context(told)) == (5, {"kept": 1})  # type: ignore[arg-type]


def test_nothing_changes_before_they_have_told_anything() -> None:
    assert wanted_replicas(context({})) == (2, {"kept": 1})  # type: ignore[arg-type]
