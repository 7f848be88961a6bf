"""Limits that an answer must keep to be worth anything: what goodput counts."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from statistics import median
from typing import Final

from benchmarks.serving.client import Outcome

PATIENCE: Final = 5.0
"""Limits, where nobody gave any: so many times what plain decoding takes of a server with nothing else to do."""

_LIMIT = re.compile(r"(ttft|tpot|e2e):([0-9]+(?:[.][0-9]*)?|[.][0-9]+)(ms|s)")


@dataclass(frozen=True, slots=True)
class Slo:
    """Most seconds to the first token, for each token after it, and to the end; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Of ``ttft:500ms,tpot:50ms,e2e:5s``, or some of these; raises ValueError."""
        limits: dict[str, float] = {}
        for each in text.split(","):
            found = _LIMIT.fullmatch(each.strip())
            if found is None:
                raise ValueError(f"{each.strip()!r} is no limit such as ttft:500ms, tpot:50ms or e2e:5s")
            limits[found[1]] = float(found[2]) * (1e-3 if found[3] == "ms" else 1.0)
        return cls(**limits)

    @classmethod
    def of_idle_server(cls, alone: list[Outcome]) -> Slo:
        """``PATIENCE`` times the medians of answers that had the server to themselves."""
        per_token = [each for outcome in alone if (each := outcome.per_token) is not None]
        return cls(
            ttft=PATIENCE * median(outcome.first for outcome in alone), tpot=PATIENCE * median(per_token) if per_token else None
        )

    def met_by(self, outcome: Outcome) -> bool:
        """Whether an answer came, and in time."""
        per_token = outcome.per_token or 0.0
        taken = {"ttft": outcome.first, "tpot": per_token, "e2e": outcome.end}
        limits = {each.name: getattr(self, each.name) for each in fields(self)}
        return outcome.error is None and all(limit is None or taken[name] <= limit for name, limit in limits.items())

    def line(self) -> str:
        """For people."""
        names = {"ttft": "the first token", "tpot": "each token after it", "e2e": "the end"}
        limits = [(name, getattr(self, field)) for field, name in names.items()]
        told = (
            (name, f"{limit:.4g} s" if limit >= 0.9995 else f"{limit * 1e3:.3g} ms") for name, limit in limits if limit is not None
        )
        return ", ".join(f"{name} within {limit}" for name, limit in told)
