"""The load of several engines as if they were one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from speculative.config import EngineStatus


def sum_of(statuses: Sequence[EngineStatus]) -> EngineStatus:
    """Counts add up, the share of the KV cache is the mean; of trees the largest count."""
    seconds: Counter[str] = Counter()
    for status in statuses:
        seconds.update(dict(status.phase_seconds))
    return EngineStatus(
        num_running=sum(status.num_running for status in statuses),
        num_waiting=sum(status.num_waiting for status in statuses),
        kv_cache_usage=sum(status.kv_cache_usage for status in statuses) / max(1, len(statuses)),
        draft_depth=max((status.draft_depth for status in statuses), default=0),
        draft_nodes=max((status.draft_nodes for status in statuses), default=0),
        num_steps=sum(status.num_steps for status in statuses),
        phase_seconds=dict(seconds),
    )
