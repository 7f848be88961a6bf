"""Whether an engine is well: one rule for /health and for those who replace replicas."""

from __future__ import annotations

from app.metric_names import Watched


def ailment(engine: Watched, limit: float) -> str:
    """What is wrong with an engine, "" where nothing is; a step may take ``limit`` seconds (0: any time)."""
    if not engine.alive:
        return "The engine is not running."
    if limit and engine.busy_seconds > limit:
        return f"The engine has not finished a step for {limit:g} seconds."
    return ""
