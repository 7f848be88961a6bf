"""Everything that decides which activations are kept, in one frozen place."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from training.choices import Method
from training.errors import ConfigError
from training.run_config import TextConfig, check_finite, check_not_negative, check_positive, fastest_precision


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationsConfig(TextConfig):
    """What drafters of a ``method`` learn from, of ``target`` over ``data``, in files of at most ``shard_mb`` million bytes.

    ``dtype`` is what is kept.
    """

    target: str
    method: Method = "moa"
    layers_inferred: int = 0
    regenerate: int | None = None
    regenerate_temperature: float = 0.0
    shard_mb: int = 512
    shard_target: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        TextConfig.__post_init__(self)
        if self.data is None:
            raise ConfigError("say what the target shall read: --data")
        check_positive(self, "shard_mb", "regenerate")
        check_not_negative(self, "layers_inferred", "regenerate_temperature")
        check_finite(self, "regenerate_temperature")
        if self.method != "moa" and self.layers_inferred:
            raise ConfigError(f"--layers-inferred is no option of --method {self.method}")

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the target computes in: what is kept, or float32 where that is faster."""
        return torch.float32 if fastest_precision(self.device) == "float32" else self.torch_dtype
