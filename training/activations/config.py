"""Everything that decides which activations are kept, in one frozen place."""

from __future__ import annotations

from dataclasses import dataclass

from training.choices import Method
from training.config import TextConfig
from training.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationsConfig(TextConfig):
    """What drafters of a ``method`` learn from, of ``target`` over ``data``, in files of at most ``shard_mb`` million bytes.

    ``dtype`` is what the target computes in and what is kept.
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
        for name in ("shard_mb", "regenerate"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ConfigError(f"{name} must be above 0, not {value}")
        if self.layers_inferred < 0 or self.regenerate_temperature < 0:
            raise ConfigError("layers_inferred and regenerate_temperature must not be negative")
        if self.method != "moa" and self.layers_inferred:
            raise ConfigError(f"--layers-inferred is no option of --method {self.method}")
