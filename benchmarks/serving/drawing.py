"""Pictures of `moaserve bench serving`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from benchmarks.serving.figures import Figures, Percentiles
from benchmarks.serving.ways import OFF

Found = Mapping[tuple[float, str], Figures]
"""By rate and way."""

PAPER: Final = {
    "MoA": {0.5: 1.73, 1.0: 1.62, 4.0: 1.49, 8.0: 1.39, 16.0: 1.28, 32.0: 1.22},
    "EAGLE-2": {0.5: 1.40, 1.0: 1.29, 4.0: 1.24, 8.0: 1.13, 16.0: 1.09, 32.0: 1.09},
}
"""Latency speed-up by requests a second: vLLM, a chain of 3, HumanEval, Poisson arrivals (Zimmer et al., arXiv 2410.03804)."""

_LATENCIES: Final[dict[str, Callable[[Figures], Percentiles | None]]] = {
    "to the first token": lambda each: each.ttft,
    "between texts": lambda each: each.itl,
    "per token after the first": lambda each: each.tpot,
    "end to end": lambda each: each.e2e,
}
GOODPUT: Final = "goodput: requests a second"
_PERCENTILES: Final[dict[str, Callable[[Percentiles], float]]] = {
    "p50": lambda each: each.p50,
    "p90": lambda each: each.p90,
    "p99": lambda each: each.p99,
}


def draw(found: Found, folder: Path, *, what: str, capacity: float | None) -> list[Path]:
    """Latency and throughput by rate and way, and, where plain decoding was measured, speed-up beside the paper's.

    ``what`` says in words what was asked; ``capacity`` is in requests a second, None where nobody knows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {
        "latency.png": _latency(found, f"Latency from the time at which a request was due, in milliseconds\n{what}", capacity),
        "throughput.png": _throughput(found, f"What comes out, by what is asked\n{what}", capacity),
    }
    if any(each.speed_up is not None for each in found.values()):
        pictures["speed-up.png"] = _speed_up(found, what, capacity)
    for name, picture in pictures.items():
        picture.savefig(folder / name, dpi=150, bbox_inches="tight")
        plt.close(picture)
    return [folder / name for name in pictures]


def _ways(found: Found) -> dict[str, str]:
    """Colours: each way's is the same in all pictures."""
    return {way: f"C{number}" for number, way in enumerate(dict.fromkeys(way for _, way in found))}


def _rates(found: Found) -> list[float]:
    return sorted({rate for rate, _ in found})


def _latency(found: Found, title: str, capacity: float | None) -> Figure:
    """Latencies side by side, percentiles below each other."""
    picture, axes = plt.subplots(
        len(_PERCENTILES), len(_LATENCIES), figsize=(16, 9), sharex=True, sharey="col", squeeze=False, layout="constrained"
    )
    picture.suptitle(title)
    for row, (percentile, value) in zip(axes, _PERCENTILES.items(), strict=True):
        row[0].set_ylabel(percentile)
        for axis, latency in zip(row, _LATENCIES.values(), strict=True):
            for way, colour in _ways(found).items():
                known = [(rate, latency(found[rate, way])) for rate in _rates(found) if (rate, way) in found]
                points = [(rate, value(each) * 1e3) for rate, each in known if each is not None]
                _line(axis, [(rate, each) for rate, each in points if each > 0], way, colour)
            _scale(axis, _rates(found))
            if any(len(line.get_ydata()) for line in axis.lines):  # a text that comes at once leaves nothing between
                axis.set_yscale("log")
                axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
                axis.yaxis.set_major_formatter(FuncFormatter(_plain))
                axis.yaxis.set_minor_formatter(NullFormatter())
    for axis, name in zip(axes[0], _LATENCIES, strict=True):
        axis.set_title(name)
        _loads(axis, _rates(found), capacity)
    for axis in axes[-1]:
        axis.set_xlabel("requests a second")
    _name(picture, axes[0][0])
    return picture


def _throughput(found: Found, title: str, capacity: float | None) -> Figure:
    shown: dict[str, Callable[[Figures], float | None]] = {
        "tokens a second": lambda each: each.tokens_per_second,
        GOODPUT: lambda each: each.goodput,
        "requests in flight": lambda each: each.in_flight,
        "τ, where something was drafted": lambda each: each.tau,
        "tokens a pass of the target": lambda each: each.tokens_per_pass,
    }
    picture, axes = plt.subplots(1, len(shown), figsize=(18, 4.5), squeeze=False, layout="constrained")
    picture.suptitle(title)
    for axis, (name, value) in zip(axes[0], shown.items(), strict=True):
        for way, colour in _ways(found).items():
            known = [(rate, value(found[rate, way])) for rate in _rates(found) if (rate, way) in found]
            _line(axis, [(rate, each) for rate, each in known if each is not None], way, colour)
        if name == GOODPUT:
            axis.plot(_rates(found), _rates(found), "--", color="gray", linewidth=0.8)
            axis.annotate("all that come", (_rates(found)[-1], _rates(found)[-1]), ha="right", va="bottom", fontsize="x-small")
        axis.set_title(name)
        axis.set_xlabel("requests a second")
        axis.set_ylim(bottom=0)
        _scale(axis, _rates(found))
        _loads(axis, _rates(found), capacity)
    _name(picture, axes[0][0])
    return picture


def _speed_up(found: Found, what: str, capacity: float | None) -> Figure:
    """Ours on the left, medians over requests with quartiles, and each round's median as a dot; the paper's on the right."""
    picture, (ours, paper) = plt.subplots(1, 2, figsize=(13, 5), sharey=True, layout="constrained")
    picture.suptitle(f"Latency speed-up over no speculation, by load\n{what}")
    for number, (way, colour) in enumerate(_ways(found).items()):
        beside = 1 + 0.02 * number  # quartiles of ways at one rate would hide each other
        known = [(rate, found[rate, way].speed_up) for rate in _rates(found) if (rate, way) in found]
        ups = [(rate * beside, up) for rate, up in known if up is not None and not way.startswith(OFF)]
        if not ups:
            continue
        _line(ours, [(rate, up.e2e.median) for rate, up in ups], way, colour)
        errors = [[up.e2e.median - up.e2e.p25 for _, up in ups], [up.e2e.p75 - up.e2e.median for _, up in ups]]
        rates, medians = [rate for rate, _ in ups], [up.e2e.median for _, up in ups]
        ours.errorbar(rates, medians, errors, fmt="none", ecolor=colour, capsize=2, linewidth=0.8, alpha=0.6)
        for rate, up in ups:
            ours.plot([rate] * len(up.e2e_by_round), up.e2e_by_round, "k.", markersize=3)
    ours.set_title("here: median over requests, quartiles, and rounds as dots")
    for number, (name, points) in enumerate(PAPER.items()):
        _line(paper, list(points.items()), name, f"C{7 + number}")
    paper.set_title("Zimmer et al., ICLR 2025: vLLM, chain of 3, HumanEval")
    _scale(paper, list(PAPER["MoA"]))
    _scale(ours, _rates(found))
    _loads(ours, _rates(found), capacity)
    for axis in (ours, paper):
        axis.axhline(1, color="gray", linewidth=0.8)
        axis.set_xlabel("requests a second")
        axis.legend(fontsize="small")
    ours.set_ylabel("times as fast, end to end")
    return picture


def _line(axis: Axes, points: Sequence[tuple[float, float]], name: str, colour: str) -> None:
    axis.plot([x for x, _ in points], [y for _, y in points], "o-", color=colour, label=name, markersize=4)


def _scale(axis: Axes, rates: Sequence[float]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(rates, [f"{rate:.3g}" for rate in rates], fontsize="small")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.grid(alpha=0.3)


def _loads(axis: Axes, rates: Sequence[float], capacity: float | None) -> None:
    """The rates as shares of capacity, above."""
    if capacity is None:
        return
    above = axis.secondary_xaxis("top")
    above.set_xticks(rates, [f"{rate / capacity:.2f}" for rate in rates], fontsize="x-small", color="gray")
    above.xaxis.set_minor_locator(NullLocator())
    above.tick_params(length=2, color="gray")
    above.set_xlabel("of capacity", fontsize="x-small", color="gray")


def _plain(value: float, _: object) -> str:
    return f"{value:g}"


def _name(picture: Figure, axis: Axes) -> None:
    """Beside the panels, where no line runs."""
    picture.legend(*axis.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
