"""Pictures of an evaluation, each to be understood by itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.evaluation import ALL, Case, Figures

Results = dict[Case, dict[str, Figures]]


def draw(results: Results, folder: Path, *, prompts: str) -> list[Path]:
    """One picture for acceptance length, acceptance by depth and speed each; ``prompts`` says in words what was decoded."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {
        "acceptance-length.png": _acceptance_length(results, prompts),
        "acceptance-by-depth.png": _acceptance_by_depth(results, prompts),
        "speed.png": _speed(results, prompts),
    }
    paths = []
    for name, picture in pictures.items():
        picture.savefig(folder / name, dpi=150, bbox_inches="tight")
        plt.close(picture)
        paths.append(folder / name)
    return paths


def _label(case: Case) -> str:
    return f"{case.drafter}, {case.shape}"


def _by_sampling(results: Results) -> dict[str, list[Case]]:
    return {
        sampling: [case for case in results if case.sampling == sampling] for sampling in dict.fromkeys(c.sampling for c in results)
    }


def _panels(results: Results, title: str) -> tuple[Figure, Sequence[Axes], dict[str, list[Case]]]:
    """One panel for each way of sampling, side by side."""
    groups = _by_sampling(results)
    rows = max(len(cases) for cases in groups.values())
    picture, axes = plt.subplots(
        1,
        len(groups),
        figsize=(1 + 5 * len(groups), 2.2 + 0.34 * rows),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    picture.suptitle(title)
    for axis, name in zip(axes[0], groups, strict=True):
        axis.set_title(name)
    return picture, axes[0], groups


def _acceptance_length(results: Results, prompts: str) -> Figure:
    picture, axes, groups = _panels(
        results, f"Acceptance length τ: tokens gained by a verification that carries a draft\n{prompts}"
    )
    for axis, cases in zip(axes, groups.values(), strict=True):
        every = [results[case][ALL] for case in cases]
        errors = [[f.tau - f.tau_low for f in every], [f.tau_high - f.tau for f in every]]
        bars = axis.barh(
            [_label(case) for case in cases], [f.tau for f in every], xerr=errors, capsize=3, color="tab:blue", alpha=0.8
        )
        axis.bar_label(bars, [f"{f.tau:.2f}" for f in every], label_type="center", color="white")
        axis.axvline(1, color="gray", linewidth=0.8)
        axis.set_xlabel("τ, with 95% intervals over prompts (1: plain decoding)")
    axes[0].invert_yaxis()
    return picture


def _acceptance_by_depth(results: Results, prompts: str) -> Figure:
    groups = _by_sampling(results)
    picture, axes = plt.subplots(
        1, len(groups), figsize=(1 + 5 * len(groups), 4.6), sharey=True, squeeze=False, layout="constrained"
    )
    picture.suptitle(f"How many drafted tokens in a row the target accepts\n{prompts}")
    for axis, (name, cases) in zip(axes[0], groups.items(), strict=True):
        for case in cases:
            shares = results[case][ALL].by_depth
            style = "--" if case.shape == "chain" else "-"
            axis.plot(range(1, len(shares) + 1), shares, style, marker="o", markersize=4, label=_label(case))
        axis.set_title(name)
        axis.set_xlabel("depth")
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("share of drafts accepted at least so far")
    axes[0][-1].legend(fontsize="small")
    return picture


def _speed(results: Results, prompts: str) -> Figure:
    picture, axes, groups = _panels(results, f"Speed over plain decoding by the same server\n{prompts}")
    for axis, cases in zip(axes, groups.values(), strict=True):
        every = [results[case][ALL] for case in cases]
        bars = axis.barh([_label(case) for case in cases], [f.decode_ratio for f in every], color="tab:green", alpha=0.8)
        axis.bar_label(
            bars, [f"{f.decode_ratio:.2f}x; drafting costs {f.draft_cost:.2f} steps" for f in every], padding=3, fontsize="small"
        )
        axis.axvline(1, color="gray", linewidth=0.8)
        axis.margins(x=0.9)
        axis.set_xlabel("decoding alone, all prompts (1x: plain decoding)")
    axes[0].invert_yaxis()
    return picture
