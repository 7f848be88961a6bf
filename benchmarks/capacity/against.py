"""The simulation beside a server that was measured: `moaserve bench serving`'s plain decoding, rate by rate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.capacity.costs import Costs, CostsError
from benchmarks.capacity.simulating import simulate_requests
from benchmarks.prompts import Prompt

WAY = "off"
SECONDS = 120.0
"""Simulated for each rate."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Requests a second, and of each figure what was measured and what was foretold, in seconds (``busy``: a share)."""

    rate: float
    measured: dict[str, float]
    foretold: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def line(self) -> str:
        """For people."""
        parts = [
            f"{name} {self.foretold[name] * 1000:.1f} ms foretold, {self.measured[name] * 1000:.1f} measured"
            for name in ("ttft_p50", "tpot_mean", "e2e_mean")
        ]
        return f"{self.rate:g} requests/s: " + "; ".join(parts)


def compare(path: Path, costs: Costs, prompts: Sequence[Prompt], *, seed: int) -> list[Compared]:
    """Requests as those of the newest round in ``path``: its rates and ``prompts``, answers scaled to the mean that was measured.

    Server and event loop shared a core there, so they do here. Raises CostsError.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        rounds = [each for each in told["figures"] if each["way"] == WAY and each["round"] is not None]
        newest = max(each["round"] for each in rounds)
        figures = {each["rate"]: each["figures"] for each in rounds if each["round"] == newest}
        pairs = [(len(prompt.token_ids), prompt.answer_tokens or 0) for prompt in prompts]
        found = []
        for rate, figure in sorted(figures.items()):
            answer = figure["tokens"] / figure["requests"]
            scale = answer * len(pairs) / max(1, sum(length for _, length in pairs))
            requests = _requests(Random(seed), rate, [(prompt, max(1, round(length * scale))) for prompt, length in pairs])
            one = simulate_requests(costs, requests, shares_core=True)
            measured = {
                "ttft_p50": figure["ttft"]["p50"],
                "tpot_mean": figure["tpot"]["mean"],
                "e2e_mean": figure["e2e"]["mean"],
                "busy": figure["busy"],
            }
            foretold = {name: getattr(one, name) for name in measured}
            found.append(Compared(rate, measured, foretold))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CostsError(f"{path} is not what `moaserve bench serving` keeps: {error!r}") from error
    return found


def _requests(rng: Random, rate: float, pairs: Sequence[tuple[int, int]]) -> list[tuple[float, int, int]]:
    found, now = [], 0.0
    while (now := now + rng.expovariate(rate)) < SECONDS:
        found.append((now, *rng.choice(pairs)))
    return found
