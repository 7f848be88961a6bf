"""What decides any run: which text, on what, for how long."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from models.tiles import multiplies_bfloat16
from training.choices import Optimizer, Precision, Schedule
from training.errors import ConfigError

LIMITS_AND_PLACES = frozenset(
    [
        "out",
        "data",
        "valid",
        "epochs",
        "max_steps",
        "max_minutes",
        "threads",
        "compile",
        "log_every",
        "checkpoint_steps",
        "checkpoint_minutes",
        "valid_every",
        "valid_tokens",
        "resume",
        "cache",
        "target",
        "base",
        "draft_vocabulary",
        "activations",
        "shard_target",
    ]
)
"""Settings that a resumed run may change: they do not alter what a step computes."""


DEVICES = ("auto", "cpu", "cuda")
"""What may be said of the device; which GPU a process takes, the launcher decides."""


def default_cache() -> Path:
    """Where tokenised corpora are kept unless told otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moaserve" / "corpora"


def fastest_precision(device: str) -> Precision:
    """What a ``device`` of these computes fastest in."""
    kind = "cpu" if device == "cpu" or not torch.cuda.is_available() else "cuda"
    return "bfloat16" if multiplies_bfloat16(torch.device(kind)) else "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """Which conversations are read, in what batches, and on what they are run."""

    data: str | None = None
    out: Path
    valid: str | None = None

    batch_tokens: int = 8192
    max_length: int = 2048
    valid_tokens: int = 100_000

    dtype: Precision = "bfloat16"
    device: str = "auto"
    seed: int = 0
    threads: int | None = None
    cache: Path = dataclasses.field(default_factory=default_cache)

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        check_positive(self, "batch_tokens", "max_length", "valid_tokens", "threads")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"--seed must be from 0 to 2^32 - 1, not {self.seed}")
        if self.device not in DEVICES:
            raise ConfigError(
                f"--device {self.device}: {', '.join(DEVICES)} are what can be said; CUDA_VISIBLE_DEVICES chooses among GPUs"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """What the forward passes compute in; master weights are float32 whatever it is."""
        return torch.bfloat16 if self.dtype == "bfloat16" else torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(TextConfig):
    """What every training run has. Of ``epochs``, ``max_steps`` and ``max_minutes`` whichever is reached first ends it.

    ``None`` means no limit; minutes count across resumes.
    """

    optimizer: Optimizer = "adamw"
    lr: float = 3e-5
    warmup: int = 50
    schedule: Schedule = "constant"
    weight_decay: float = 0.0
    beta2: float = 0.999
    clip: float = 1.0
    accumulate: int = 1

    epochs: float | None = None
    max_steps: int | None = None
    max_minutes: float | None = None

    compile: bool = False
    log_every: int = 10
    checkpoint_steps: int | None = None
    checkpoint_minutes: float = 10.0
    valid_every: int = 500
    resume: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        TextConfig.__post_init__(self)
        if self.epochs is None and self.max_steps is None and self.max_minutes is None:
            raise ConfigError("say when to stop: --epochs, --max-steps or --max-minutes")
        check_positive(
            self,
            "lr",
            "accumulate",
            "log_every",
            "checkpoint_minutes",
            "valid_every",
            "clip",
            "epochs",
            "max_steps",
            "max_minutes",
            "checkpoint_steps",
        )
        check_not_negative(self, "warmup", "weight_decay")
        check_finite(self, "lr", "weight_decay")
        if not 0 <= self.beta2 < 1:
            raise ConfigError(f"--beta2 must be at least 0 and below 1, not {self.beta2}")

    def to_json(self) -> dict[str, Any]:
        """Plain values, for training.json and checkpoints."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in dataclasses.asdict(self).items()}

    def check_resumable(self, earlier: dict[str, Any]) -> None:
        """Raise ConfigError when a checkpoint was made with settings that this run would break with."""
        mine = self.to_json()
        changed = [
            f"{name} was {earlier[name]!r} and is now {mine[name]!r}"
            for name in mine
            if name not in LIMITS_AND_PLACES and name in earlier and earlier[name] != mine[name]
        ]
        if changed:
            raise ConfigError(f"cannot resume with other settings: {'; '.join(changed)}")


def check_positive(config: TextConfig, *names: str) -> None:
    """Raise ConfigError for settings that are not above 0; unset ones may be None."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:  # NaN is not, either
            raise ConfigError(f"{option_name(name)} must be above 0, not {value}")


def check_not_negative(config: TextConfig, *names: str) -> None:
    """Raise ConfigError for settings below 0."""
    for name in names:
        if not getattr(config, name) >= 0:
            raise ConfigError(f"{option_name(name)} must not be negative, it is {getattr(config, name)}")


def check_finite(config: TextConfig, *names: str) -> None:
    """Raise ConfigError for settings of which infinitely much makes no sense."""
    for name in names:
        if not math.isfinite(getattr(config, name)):
            raise ConfigError(f"{option_name(name)} must be finite, it is {getattr(config, name)}")


def option_name(name: str) -> str:
    """A setting as a command's option."""
    return f"--{name.replace('_', '-')}"
