"""The picture of `moaserve bench peers`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.peers.figures import Figures, Key
from benchmarks.peers.ways import OURS


def draw(found: Mapping[Key, Figures], path: Path, *, title: str) -> Path:
    """Tokens per second of all ways, a panel for each number of prompts at once, with our speed over each."""
    levels = list(dict.fromkeys(number for number, _ in found))
    most = max(sum(number == level for number, _ in found) for level in levels)
    picture, axes = plt.subplots(
        1, len(levels), figsize=(1 + 6 * len(levels), 1.6 + 0.38 * most), squeeze=False, layout="constrained"
    )
    picture.suptitle(title)
    for axis, level in zip(axes[0], levels, strict=True):
        shown = {name: each for (number, name), each in found.items() if number == level}
        colours = ["tab:blue" if name.startswith(OURS) else "tab:gray" for name in shown]
        bars = axis.barh(list(shown), [each.tokens_per_second for each in shown.values()], color=colours, alpha=0.8)
        axis.bar_label(bars, [_label(name, each) for name, each in shown.items()], padding=3, fontsize="small")
        axis.set_title(f"{level} at once")
        axis.set_xlabel("tokens per second, prompts included")
        axis.margins(x=0.6)
        axis.invert_yaxis()
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(picture)
    return path


def _label(name: str, each: Figures) -> str:
    speed = f"{each.tokens_per_second:.0f}"
    if name == OURS or each.ours_over is None:
        return speed
    over = each.ours_over
    return f"{speed}; ours {over['median']:.1f}x ({over['p25']:.1f}–{over['p75']:.1f})"
