"""Training state on disk: whole or not at all, the newest two."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from models.durable import whole
from training.errors import ConfigError, TrainingError, first_line

KEEP = 2

PARTS = frozenset(["config", "corpus", "position", "model", "optimizers"])
"""What there is in every checkpoint of a run."""


@dataclass(slots=True)
class Position:
    """How far a run is. Every random draw is a function of the seed and of this, so no generator's state need be kept."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    tokens: int = 0
    seconds: float = 0.0


def save_checkpoint(folder: Path, state: dict[str, Any], step: int) -> Path:
    """Write ``checkpoint-<step>.pt`` beside its place, flush it to the disk, rename it, and drop all but the newest two.

    Raises TrainingError where the disk does not take it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for cut_off in folder.glob("checkpoint-*.tmp"):
        cut_off.unlink()
    path = folder / f"checkpoint-{step:08d}.pt"
    try:
        with whole(path) as temporary:
            torch.save(state, temporary)
    except (OSError, RuntimeError) as error:  # PyTorch says of a full disk only that it is at another position than expected
        earlier = "there is no earlier checkpoint" if latest_checkpoint(folder) is None else "earlier checkpoints are whole"
        raise TrainingError(f"cannot write {path}, is the disk full? ({first_line(error)}); {earlier}") from error
    for old in sorted(folder.glob("checkpoint-*.pt"))[:-KEEP]:
        old.unlink()
    return path


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in a folder, if any."""
    return max(folder.glob("checkpoint-*.pt"), default=None)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint; tensors and plain values only, no code is run. Raises ConfigError for a damaged one, or something else."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # PyTorch takes numbers as they are, whatever their checksums
        state = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigError(f"{path} is no checkpoint of this trainer: {first_line(error)}; {_instead_of(path)}") from error
    if damaged:
        raise ConfigError(f"{path} is damaged ({damaged} is not what its checksum says); {_instead_of(path)}")
    if not isinstance(state, dict) or not state.keys() >= PARTS:
        raise ConfigError(f"{path} is no checkpoint of this trainer: it holds something else")
    return state


def _instead_of(path: Path) -> str:
    """What to do without a checkpoint."""
    earlier = max((other for other in path.parent.glob("checkpoint-*.pt") if other < path), default=None)
    if earlier is None:
        return "there is none before it: delete it, and begin anew without --resume"
    return f"delete it to go on from the one before it, {earlier.name}"
