"""Results as plain JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.network.figures import crowd_figures, figures
from benchmarks.network.measuring import Results, Run
from benchmarks.network.verdicts import differing, verdicts


def as_dict(results: Results) -> dict[str, Any]:
    """For JSON: figures, and every single run without its text."""
    found, crowds = figures(results), crowd_figures(results)
    different, total = differing([*found.values(), *crowds.values()])
    return {
        "texts": {"total": total, "different_from_plain": different},
        "failures": results.failures,
        "figures": [
            {"link": link, "temperature": temperature, "kind": kind, **_rounded(asdict(each))}
            for (link, temperature, kind), each in found.items()
        ],
        "verdicts": [_rounded(asdict(verdict)) for verdict in verdicts(found)],
        "crowds": [
            {"link": crowd.link, "temperature": crowd.temperature, "kind": crowd.kind}
            | _rounded(asdict(crowds[crowd.temperature, crowd.kind]))
            for crowd in results.crowds
        ],
        "runs": [_run(run) for run in results.runs],
    }


def _run(run: Run) -> dict[str, Any]:
    answer = run.answer
    measured = {"tokens": answer.tokens, "first": answer.first, "seconds": answer.seconds, "cost": asdict(run.cost)}
    who = {"kind": run.kind, "link": run.link, "temperature": run.temperature, "round": run.round, "prompt": run.prompt}
    return {**who, **_rounded(measured), "metrics": answer.stats}


def _rounded(value: Any) -> Any:
    """Six significant digits are more than any of this has."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
