"""What runs add up to: speeds, and ours over others' group by group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

from benchmarks.peers.measuring import Results
from benchmarks.peers.ways import ASSISTANCE, OURS, Answered


@dataclass(frozen=True, slots=True)
class Figures:
    """One way, so many asked at once.

    ``tokens_per_second``: all tokens over all time. ``ours_over``: median and quartiles of our speed over this way's, group by
    group (one prompt, or all that are asked at once); None where no group has both. ``identical`` of ``texts`` are ours.
    """

    groups: int
    tokens_per_second: float
    ours_over: dict[str, float] | None
    identical: int
    texts: int


Key = tuple[int, str]


def figures(results: Results) -> dict[Key, Figures]:
    """Of every way, by how many are asked at once and by name."""
    return {
        (at_once, name): _figures(results.runs.get((at_once, OURS), {}), runs) for (at_once, name), runs in results.runs.items()
    }


def ratios(ours: Mapping[int, Answered], theirs: Mapping[int, Answered]) -> list[float]:
    """Our tokens per second over theirs, of each group that both answered; different lengths do not mislead."""
    # A text of no token has no speed.
    both = [(ours[number], run) for number, run in theirs.items() if number in ours]
    return [own.tokens_per_second / other.tokens_per_second for own, other in both if own.tokens and other.tokens]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, never beyond the values: eight at once leave few groups, and a ratio below zero says nothing."""
    low, median, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return {"median": round(median, 3), "p25": round(low, 3), "p75": round(high, 3)}


def best_assistance(found: Mapping[Key, Figures], at_once: int) -> str | None:
    """The name of transformers' fastest way with drafts, by the median ratio; None where there is none."""
    able = {
        name: each.ours_over["median"]
        for (number, name), each in found.items()
        if number == at_once and name.partition(" ")[0] in ASSISTANCE and each.ours_over is not None
    }
    return min(able, key=lambda name: able[name]) if able else None


def _figures(ours: Mapping[int, Answered], runs: Mapping[int, Answered]) -> Figures:
    over = ratios(ours, runs)
    pairs = [
        (own, other)
        for number, run in runs.items()
        if number in ours
        for own, other in zip(ours[number].texts, run.texts, strict=True)
    ]
    return Figures(
        groups=len(runs),
        tokens_per_second=sum(run.tokens for run in runs.values()) / sum(run.seconds for run in runs.values()),
        ours_over=spread(over) if over else None,
        identical=sum(own == other for own, other in pairs),
        texts=len(pairs),
    )
