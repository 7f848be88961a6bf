"""How many sessions a replica carries, and from that what any number of sessions needs and where what is shared ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from math import ceil, inf
from typing import Any

from benchmarks.capacity.costs import Costs, Workload
from benchmarks.capacity.simulating import Simulated, simulate_sessions

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Goals:
    """What 99 of 100 turns must keep to, in seconds: the first token, and a token after it (the mean of an answer)."""

    ttft: float = 1.0
    tpot: float = 0.05


@dataclass(frozen=True, slots=True)
class Limits:
    """What one of each shared thing has. ``busy`` is the share of a core or a link that is planned to be used."""

    redis_memory: float = 64 * GIB
    redis_network: float = 10e9 / 8
    ingress_network: float = 10e9 / 8
    busy: float = 0.6


@dataclass(frozen=True, slots=True)
class Carried:
    """The most ``sessions`` that one replica carries within the goals, and what it does with them."""

    way: str
    workload: Workload
    redis: bool
    sessions: int
    at: Simulated

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Needs:
    """What ``sessions`` sessions need: replicas, and bytes, bytes a second and cores of Redis and of the ingress.

    ``redis_servers`` is how many Redis servers that makes by what ends first, ``ingress_cores`` how many event loops.
    """

    sessions: int
    replicas: int
    turns_per_second: float
    tokens_per_second: float
    redis_commands: float
    redis_cpu: float
    redis_in: float
    redis_out: float
    redis_memory: float
    redis_servers: int
    ingress_cpu: float
    ingress_cores: int
    ingress_out: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


WAYS = ("follow-ups where their prefix is, Redis", "follow-ups anywhere, Redis", "follow-ups anywhere, no Redis")
"""With affinity as the workload has it, with none and Redis alone to carry prefixes, and with nothing that does."""


def carry(
    costs: Costs, workload: Workload, way: str, goals: Goals, *, seconds: float, seed: int, progress: Callable[[], None]
) -> Carried:
    """Double until goals are missed, then halve the gap to a fiftieth; 0 sessions where not even one is within them."""
    asked = workload if way == WAYS[0] else replace(workload, affinity=0.0)
    redis_tokens = 0.0 if way == WAYS[2] else inf

    def tried(sessions: int) -> Simulated:
        progress()
        return simulate_sessions(
            costs, asked, sessions, seconds=seconds, warm_up=2 * workload.think, seed=seed, redis_tokens=redis_tokens
        )

    def kept(found: Simulated) -> bool:
        return found.ttft_p99 <= goals.ttft and found.tpot_p99 <= goals.tpot

    low, high = 0, 16
    best = found = tried(high)
    while kept(found):
        low, best, high = high, found, 2 * high
        found = tried(high)
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        found = tried(middle)
        if kept(found):
            low, best = middle, found
        else:
            high = middle
    return Carried(way, asked, redis_tokens > 0, low, best)


def needs(costs: Costs, carried: Carried, sessions: int, limits: Limits, headroom: float) -> Needs:
    """Scale what one replica does to ``sessions``; ``headroom`` is the share of what a replica could carry that is left free."""
    kept, http, one = costs.sessions, costs.http, carried.at
    turns = sessions * one.turns_per_second / carried.sessions
    moved = one.written + one.fetched if carried.redis else 0.0
    asked = one.blocks_asked if carried.redis else 0.0
    cpu = kept.turn_cpu + one.written * kept.write_cpu + one.fetched * kept.fetch_cpu if carried.redis else 0.0
    tokens = sessions * one.tokens_per_second / carried.sessions
    into, out = turns * one.written * kept.written_bytes, turns * one.fetched * kept.fetched_bytes
    memory = sessions * one.context * kept.stored_bytes if carried.redis else 0.0
    ingress = turns * http.request_cpu + tokens * http.token_cpu
    servers = max(turns * cpu / limits.busy, memory / limits.redis_memory, max(into, out) / (limits.busy * limits.redis_network))
    return Needs(
        sessions=sessions,
        replicas=ceil(sessions / (carried.sessions * (1 - headroom))),
        turns_per_second=turns,
        tokens_per_second=tokens,
        redis_commands=turns * (kept.turn_commands + kept.block_commands * (asked + moved / 16)) if carried.redis else 0.0,
        redis_cpu=turns * cpu,
        redis_in=into,
        redis_out=out,
        redis_memory=memory,
        redis_servers=ceil(servers),
        ingress_cpu=ingress,
        ingress_cores=ceil(ingress / limits.busy),
        ingress_out=tokens * http.token_bytes,
    )


def saturation(costs: Costs, carried: Carried, limits: Limits) -> dict[str, float]:
    """At how many sessions one of each is used as far as planned, the earliest first; what is never used is left out."""
    one = needs(costs, carried, 1_000_000, limits, 0.0)
    uses = {
        "one event loop (a core)": one.ingress_cpu / limits.busy,
        "one ingress' network": one.ingress_out / (limits.busy * limits.ingress_network),
        "one Redis' processor": one.redis_cpu / limits.busy,
        "one Redis' memory": one.redis_memory / limits.redis_memory,
        "one Redis' network": max(one.redis_in, one.redis_out) / (limits.busy * limits.redis_network),
    }
    found = {"one replica": float(carried.sessions)} | {name: 1e6 / use for name, use in uses.items() if use > 0}
    return dict(sorted(found.items(), key=lambda each: each[1]))
