"""What a run leaves in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The float32 master weights of the newest checkpoint."""
    state: dict[str, torch.Tensor] = torch.load(max((folder / "checkpoints").glob("*.pt")), weights_only=True)["model"]
    return state


def log(folder: Path) -> list[dict[str, Any]]:
    """The lines of the log, without what the clock says."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    times = ("elapsed", "tokens_per_second", "seconds")
    return [{name: value for name, value in line.items() if name not in times} for line in lines]
