"""Pictures of `moaserve bench network`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.network.figures import Figures, Key, Spread


def draw(found: dict[Key, Figures], folder: Path, *, what: str) -> list[Path]:
    """Speed, first token and bytes by link and kind; ``what`` says in words what was asked."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {
        "speed.png": _spreads(found, f"Tokens per second, prompt included\n{what}", lambda each: each.speed, _speeds, 1.0),
        "first-token.png": _spreads(found, f"Milliseconds to the first token\n{what}", lambda each: each.first, _firsts, 1e3),
        "server-calls.png": _calls(found, f"Calls of the server per 100 tokens\n{what}"),
        "bytes.png": _bytes(found, f"Bytes per token at the link, without headers\n{what}"),
    }
    for name, picture in pictures.items():
        picture.savefig(folder / name, dpi=150, bbox_inches="tight")
        plt.close(picture)
    return [folder / name for name in pictures]


def _panels(found: dict[Key, Figures], title: str) -> tuple[Figure, dict[float, Axes], list[str], list[str]]:
    """One panel for each temperature, side by side; links and kinds in the order in which they were measured."""
    temperatures = list(dict.fromkeys(key[1] for key in found))
    picture, axes = plt.subplots(
        1, len(temperatures), figsize=(1 + 6 * len(temperatures), 4.5), sharey=True, squeeze=False, layout="constrained"
    )
    picture.suptitle(title)
    for axis, temperature in zip(axes[0], temperatures, strict=True):
        axis.set_title("greedy" if temperature == 0 else f"temperature {temperature:g}")
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    links, kinds = list(dict.fromkeys(key[0] for key in found)), list(dict.fromkeys(key[2] for key in found))
    return picture, dict(zip(temperatures, axes[0], strict=True)), links, kinds


def _speeds(each: Figures) -> Sequence[float]:
    return each.speed_by_round


def _firsts(each: Figures) -> Sequence[float]:
    return each.first_by_round


def _spreads(
    found: dict[Key, Figures],
    title: str,
    value: Callable[[Figures], Spread],
    by_round: Callable[[Figures], Sequence[float]],
    factor: float,
) -> Figure:
    """Medians, quartiles as bars of error, and each round's median as a dot."""
    picture, axes, links, kinds = _panels(found, title)
    width = 0.8 / len(kinds)
    for temperature, axis in axes.items():
        for number, kind in enumerate(kinds):
            # A link over which all of a kind's requests failed has no bar.
            places, each_link = _places(links, kinds, number), [found.get((link, temperature, kind)) for link in links]
            shown = [(place, value(each)) for place, each in zip(places, each_link, strict=True) if each is not None]
            every = [spread for _, spread in shown]
            heights = [each.median * factor for each in every]
            errors = [[(each.median - each.p25) * factor for each in every], [(each.p75 - each.median) * factor for each in every]]
            axis.bar([place for place, _ in shown], heights, width, yerr=errors, capsize=2, label=kind)
            for place, each in zip(places, each_link, strict=True):
                medians = [] if each is None else [median * factor for median in by_round(each)]
                axis.plot([place] * len(medians), medians, "k.", markersize=3)
        axis.set_xticks(range(len(links)), links)
    _name(picture, axes)
    return picture


def _calls(found: dict[Key, Figures], title: str) -> Figure:
    """Of edges: a stream is one call, however long it is."""
    edges = {key: each for key, each in found.items() if each.shares.told_up is not None}
    picture, axes, links, kinds = _panels(edges or found, title)
    for temperature, axis in axes.items():
        for number, kind in enumerate(kinds):
            calls = [
                (place, edges.get((link, temperature, kind)))
                for place, link in zip(_places(links, kinds, number), links, strict=True)
            ]
            known = [(place, each.shares.server_calls) for place, each in calls if each is not None]
            shown = [(place, 100 * share) for place, share in known if share is not None]
            axis.bar([place for place, _ in shown], [share for _, share in shown], 0.8 / len(kinds), label=kind)
        axis.set_xticks(range(len(links)), links)
    _name(picture, axes)
    return picture


def _bytes(found: dict[Key, Figures], title: str) -> Figure:
    picture, axes, links, kinds = _panels(found, title)
    width = 0.8 / len(kinds)
    for temperature, axis in axes.items():
        for number, kind in enumerate(kinds):
            known = [
                (place, found[link, temperature, kind].shares)
                for place, link in zip(_places(links, kinds, number), links, strict=True)
                if (link, temperature, kind) in found
            ]
            places, shares = [place for place, _ in known], [each for _, each in known]
            up = [each.up for each in shares]
            axis.bar(places, up, width, color=f"C{number}", alpha=0.5)
            axis.bar(places, [each.down for each in shares], width, bottom=up, color=f"C{number}", label=f"{kind} (pale: up)")
        axis.set_xticks(range(len(links)), links)
    _name(picture, axes)
    return picture


def _name(picture: Figure, axes: dict[float, Axes]) -> None:
    """Beside the panels, where no bar stands."""
    last = next(reversed(axes.values()))
    picture.legend(*last.get_legend_handles_labels(), loc="outside right center", fontsize="small")


def _places(links: list[str], kinds: list[str], number: int) -> list[float]:
    """Where a kind's bars stand, around each link's number."""
    width = 0.8 / len(kinds)
    return [place + (number - (len(kinds) - 1) / 2) * width for place in range(len(links))]
