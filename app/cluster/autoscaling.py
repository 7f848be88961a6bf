"""How many replicas there should be, by their queues and caches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext


def wanted(current: int, running: float, waiting: float, slots: float, kv: float, target: float) -> int:
    """Replicas with which slots, and KV caches, are used to ``target`` (0 to 1) once those that wait run too.

    ``running`` and ``waiting`` are all replicas' requests, ``slots`` one's, ``kv`` the mean share of the caches in use. What waits
    will want as much of a cache as what runs.
    """
    by_slots = (running + waiting) / (slots * target)
    grown = kv * (running + waiting) / running if running else kv
    return max(1, math.ceil(max(by_slots, current * grown / target) - 1e-9))


def wanted_replicas(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Ray Serve's autoscaling policy; Serve keeps to its limits and delays. Nothing changes before replicas have told anything."""
    metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
    told = metrics.get("slots") or {}
    if not told:
        return context.target_num_replicas, context.policy_state

    def total(name: str) -> float:
        return sum((metrics.get(name) or {}).values())

    slots = total("slots") / len(told)
    assert context.config is not None, "a policy comes with a configuration"
    target = context.config.target_ongoing_requests / slots
    queued = float(context.total_queued_requests or 0)
    return (
        wanted(len(told), total("running"), total("waiting") + queued, slots, total("kv") / len(told), target),
        context.policy_state,
    )
