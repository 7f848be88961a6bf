"""What a run tells while it works: running means, a progress bar and a JSON-lines log."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from tqdm.auto import tqdm

from models.durable import whole
from training.losses import Loss

SHOWN_DEPTHS = (0, 1, 3)

CHAIN = 6
"""Drafted tokens a chain has when the acceptance length is estimated."""


class Meter:
    """Means of the losses over rows, and how often the drafter's best token was the target's, by draft depth."""

    def __init__(self, depths: int) -> None:
        self.right = torch.zeros(depths, dtype=torch.float64)
        self.asked = torch.zeros(depths, dtype=torch.float64)
        self.tried = torch.zeros(depths, dtype=torch.float64)
        self.survived = torch.zeros(depths, dtype=torch.float64)
        self.sums: dict[str, Tensor] = {}

    def add(self, loss: Loss, depths: Tensor) -> None:
        """Count a batch; ``depths`` [R] are its rows' draft depths."""
        for name, part in loss.parts.items():
            both = torch.stack((part.total.detach().double().cpu(), torch.tensor(part.count, dtype=torch.float64)))
            self.sums[name] = self.sums.get(name, torch.zeros(2, dtype=torch.float64)) + both
        if loss.correct is not None:
            depths, correct = depths.cpu(), loss.correct.cpu()
            alive = unbroken(correct, depths)
            self.asked += _by_depth(depths, len(self.asked))
            self.right += _by_depth(depths[correct], len(self.asked))
            self.tried += _by_depth(depths[alive], len(self.asked))
            self.survived += _by_depth(depths[alive & correct], len(self.asked))

    def gathered(self, accelerator: Accelerator) -> Meter:
        """The counts of all processes together; every process must ask."""
        if accelerator.num_processes == 1:
            return self
        total = Meter(len(self.asked))
        # As objects: a process that counted no batch knows no names of losses.
        for meter in gather_object([self]):
            for name in ("right", "asked", "tried", "survived"):
                setattr(total, name, getattr(total, name) + getattr(meter, name))
            for name, both in meter.sums.items():
                total.sums[name] = total.sums.get(name, torch.zeros(2, dtype=torch.float64)) + both
        return total

    @property
    def accuracy(self) -> list[float]:
        """Share of rows in which drafter and target agree, by draft depth; as deep as there were rows."""
        seen = int((self.asked > 0).sum())
        return [round(float(right / max(asked, 1.0)), 5) for right, asked in zip(self.right[:seen], self.asked[:seen], strict=True)]

    @property
    def acceptance_length(self) -> float:
        """Tokens gained per target pass by greedy chains of CHAIN drafted tokens, the bonus token included.

        Each depth's chance to hold, given that the shallower ones did, is measured along the text that was given; on text that
        the target did not write this is an estimate, mostly a low one.
        """
        holds = (self.survived / self.tried.clamp(min=1.0))[:CHAIN]
        return round(1.0 + float(holds.cumprod(0).sum()), 4)

    def losses(self) -> dict[str, float]:
        """Means of the losses over rows, by name."""
        return {name: round(float(total) / max(float(count), 1e-9), 5) for name, (total, count) in self.sums.items()}


def unbroken(correct: Tensor, depths: Tensor) -> Tensor:
    """Rows [R] up to which every shallower proposal since the last boundary was right; rows are in order of position."""
    failures = (~correct).long().cumsum(0) - (~correct).long()
    starts = torch.where(depths == 0, torch.arange(len(depths)), 0).cummax(0).values if len(depths) else depths
    return failures == failures.index_select(0, starts)


def _by_depth(depths: Tensor, size: int) -> Tensor:
    return torch.bincount(depths.clamp(max=size - 1), minlength=size).double()


@dataclass(slots=True)
class Window:
    """What has been trained on since the last line of the log: batches of ``tokens`` tokens, since ``start`` seconds of the run."""

    meter: Meter
    start: float
    tokens: int = 0
    last: dict[str, Any] = field(default_factory=dict)
    """What the newest update said of itself."""

    def speed(self, seconds: float) -> float:
        """Tokens a second, ``seconds`` into the run."""
        return self.tokens / max(seconds - self.start, 1e-9)


def cut_log(log: Path, step: int, *, measures_again: bool) -> None:
    """Drop what a log says of steps after ``step``, which will be trained again, and lines that were cut off.

    Where a run ``measures_again`` what it ends with, also what was measured at ``step``.
    """
    if not log.exists():
        return
    kept: list[str] = []
    for text in log.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
            again = measures_again and line["kind"] == "valid" and line["step"] == step
            if line["step"] <= step and not again:
                kept.append(text + "\n")
        except (ValueError, KeyError, TypeError):
            continue
    with whole(log) as temporary:
        temporary.write_text("".join(kept), encoding="utf-8")


class Reporter:
    """A tqdm bar over the share of the run that is done, and ``log.jsonl``. Silent where ``active`` is false."""

    def __init__(self, log: Path, *, active: bool, done: float = 0.0) -> None:
        self.log = log
        self.active = active
        interactive = sys.stderr.isatty()
        self.bar = tqdm(
            total=100.0,
            initial=100 * min(done, 1.0),
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

    def complete(self) -> None:
        """Move the bar to its end."""
        self.bar.update(self.bar.total - self.bar.n)

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
