"""The picture of a plan: what is needed by sessions, and where one of each ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.capacity.planning import GIB, Needs

COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple")


def draw(plans: Mapping[str, Sequence[Needs]], ends: Mapping[str, float], path: Path, *, title: str) -> None:
    """Replicas by way, and what is shared by the first way, over sessions; ``ends`` are the sessions at which one of each ends."""
    picture, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 4.8), layout="constrained")
    picture.suptitle(title)
    for colour, (way, rows) in zip(COLOURS, plans.items(), strict=False):
        left.plot([row.sessions for row in rows], [row.replicas for row in rows], marker="o", color=colour, label=way)
    left.set_title("replicas")
    rows = next(iter(plans.values()))
    sessions = [row.sessions for row in rows]
    shared = {
        "event loops (cores)": [row.ingress_cpu for row in rows],
        "Redis (cores)": [row.redis_cpu for row in rows],
        "Redis in (Gbit/s)": [row.redis_in * 8e-9 for row in rows],
        "Redis out (Gbit/s)": [row.redis_out * 8e-9 for row in rows],
        "Redis memory (GiB)": [row.redis_memory / GIB for row in rows],
    }
    for colour, (name, values) in zip(COLOURS, shared.items(), strict=True):
        middle.plot(sessions, values, marker="o", color=colour, label=name)
    middle.set_title("what all replicas share")
    for axis in (left, middle):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("concurrent sessions")
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
    bars = right.barh(list(ends), list(ends.values()), color="tab:gray")
    right.bar_label(bars, [f"{value:,.0f}" for value in ends.values()], padding=3)
    right.set_xscale("log")
    right.set_xlim(right=max(ends.values()) * 30)
    right.invert_yaxis()
    right.set_title("sessions at which one of each is full")
    picture.savefig(path, dpi=110)
    plt.close(picture)
