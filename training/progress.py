"""What a run tells while it works: running means, a progress bar and a JSON-lines log."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from training.losses import DraftLoss

SHOWN_DEPTHS = (0, 1, 3)


class Meter:
    """Means of the losses over rows, and how often the drafter's best token was the target's, by draft depth."""

    def __init__(self, depths: int) -> None:
        self.right = torch.zeros(depths, dtype=torch.float64)
        self.asked = torch.zeros(depths, dtype=torch.float64)
        self.sums: dict[str, float] = {}
        self.rows = 0

    def add(self, loss: DraftLoss, depths: Tensor) -> None:
        """Count a batch; ``depths`` [R] are its rows' draft depths."""
        parts = {"loss": loss.total, "kl": loss.kl, "feature": loss.feature, "predicted": loss.predicted}
        for name, value in parts.items():
            if value is not None:
                self.sums[name] = self.sums.get(name, 0.0) + float(value.detach()) * len(depths)
        self.rows += len(depths)
        if loss.correct is not None:
            size = len(self.asked)
            where = depths.clamp(max=size - 1)
            self.asked += torch.bincount(where, minlength=size).double().cpu()
            self.right += torch.bincount(where, weights=loss.correct.double(), minlength=size).cpu()

    @property
    def accuracy(self) -> list[float]:
        """Share of rows in which drafter and target agree, by draft depth; as deep as there were rows."""
        seen = int((self.asked > 0).sum())
        return [
            round(float(right / max(asked, 1.0)), 5) for right, asked in zip(self.right[:seen], self.asked[:seen], strict=True)
        ]

    def summary(self) -> dict[str, Any]:
        """Losses and accuracy by depth as plain values."""
        means: dict[str, Any] = {name: round(value / max(self.rows, 1), 5) for name, value in self.sums.items()}
        return {**means, "accuracy": self.accuracy}


class Reporter:
    """A tqdm bar over the share of the run that is done, and ``log.jsonl``. Silent where ``active`` is false."""

    def __init__(self, log: Path, *, active: bool, done: float = 0.0) -> None:
        self.log = log
        self.active = active
        interactive = sys.stderr.isatty()
        self.bar = tqdm(
            total=100.0,
            initial=100 * done,
            desc="train",
            bar_format="{desc} {percentage:3.0f}%|{bar:20}| {elapsed}{postfix}",
            mininterval=0.5 if interactive else 30.0,
            disable=not active,
        )

    def step(self, done: float, figures: dict[str, Any], seconds_left: float, tokens_per_second: float) -> None:
        """Move the bar to the share ``done`` and show the latest figures."""
        accuracy = figures.get("accuracy", [])
        shown = " ".join(f"{depth}:{accuracy[depth]:.3f}" for depth in SHOWN_DEPTHS if depth < len(accuracy))
        left = time.strftime("%H:%M:%S", time.gmtime(max(0.0, seconds_left)))
        self.bar.set_postfix_str(
            f"step {figures['step']} loss {figures['loss']:.4f} acc {shown} {tokens_per_second:,.0f} tok/s left {left}",
            refresh=False,
        )
        self.bar.update(100 * done - self.bar.n)

    def write(self, kind: str, figures: dict[str, Any]) -> None:
        """Append a line to the log."""
        if self.active:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, **figures}) + "\n")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self.active:
            self.bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Finish the bar."""
        self.bar.close()
