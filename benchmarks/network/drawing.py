"""Pictures of `moaserve bench network`."""

from __future__ import annotations

from collections.abc import Callable
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
        "speed.png": _spreads(found, f"Tokens per second, prompt included\n{what}", lambda each: each.speed, 1.0),
        "first-token.png": _spreads(found, f"Milliseconds to the first token\n{what}", lambda each: each.first, 1e3),
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


def _spreads(found: dict[Key, Figures], title: str, value: Callable[[Figures], Spread], factor: float) -> Figure:
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
        axis.set_xticks(range(len(links)), links)
    next(reversed(axes.values())).legend(fontsize="small")
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
    next(reversed(axes.values())).legend(fontsize="small")
    return picture


def _places(links: list[str], kinds: list[str], number: int) -> list[float]:
    """Where a kind's bars stand, around each link's number."""
    width = 0.8 / len(kinds)
    return [place + (number - (len(kinds) - 1) / 2) * width for place in range(len(links))]
