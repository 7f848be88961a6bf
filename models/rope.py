"""Rotary embeddings (RoPE, arXiv 2104.09864): how fast each pair of dimensions turns, and how checkpoints stretch that.

Settings and formulas are those of transformers' ``modeling_rope_utils``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.errors import CheckpointError
from models.reading import mapping, number, whole_number

_SETTINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "original_max_position_embeddings"),
}
"""What each kind has besides its base, as checkpoints name it."""

_NEEDED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
"""What there is no default of."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base ``theta`` and an optional scaling of its frequencies.

    ``kind`` is "default", "linear" (frequencies divided by ``factor``), "llama3" (low frequencies divided by ``factor``, blended
    between the two wavelengths ``original_max_position_embeddings / high_freq_factor`` and ``… / low_freq_factor``) or "yarn"
    (arXiv 2309.00071: frequencies divided by ``factor`` that turn less than ``beta_slow`` times within the original positions,
    kept where they turn more than ``beta_fast`` times, blended between; ``attention_factor`` times cosines and sines).
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        """Refuse numbers by which nothing can turn."""
        told = {"rope_theta": self.theta} | {name: getattr(self, name) for name in _SETTINGS[self.kind] if name != "truncate"}
        for name, value in told.items():
            if not (math.isfinite(value) and value > 0):
                raise CheckpointError(f"{name} is {value}, and must be above 0")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise CheckpointError(
                f"high_freq_factor is {self.high_freq_factor}, and must be above low_freq_factor ({self.low_freq_factor})"
            )
        if self.kind == "yarn" and self.theta <= 1:
            raise CheckpointError(f"rope_theta is {self.theta}, and must be above 1 with rope type 'yarn'")

    @property
    def reach(self) -> int:
        """Positions that a stretching of the context promises; 0 where checkpoints say it elsewhere."""
        return int(self.factor * self.original_max_position_embeddings) if self.kind == "yarn" else 0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Read ``rope_theta`` and ``rope_scaling`` (transformers 4) or ``rope_parameters`` (transformers 5)."""
        scaling, parameters = mapping(config, "rope_scaling"), mapping(config, "rope_parameters")
        # Whoever adds a scaling to a checkpoint of transformers 5 finds rope_parameters there, which say that there is none.
        given: dict[str, Any] = {"rope_theta": parameters["rope_theta"]} if "rope_theta" in parameters else {}
        given |= scaling or parameters
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in _SETTINGS:
            *others, last = _SETTINGS
            raise CheckpointError(f"rope type {kind!r} is not supported ({', '.join(others)} and {last} are)")
        if (share := given.get("partial_rotary_factor", config.get("partial_rotary_factor"))) not in (None, 1):
            raise CheckpointError(f"partial_rotary_factor={share} is not supported: all dimensions of a head must turn")
        positions = whole_number(config, "max_position_embeddings", 2048)
        told = {name: _setting(given, name) for name in _SETTINGS[kind] if given.get(name) is not None}
        if "original_max_position_embeddings" in _SETTINGS[kind]:
            told.setdefault("original_max_position_embeddings", positions)
            if config.get("original_max_position_embeddings"):
                told["original_max_position_embeddings"] = _setting(config, "original_max_position_embeddings")
        if kind == "yarn":  # null and 0 are read as transformers reads them
            told = {name: value for name, value in told.items() if value} | {"truncate": bool(given.get("truncate", True))}
            told.setdefault("original_max_position_embeddings", positions)
            told.setdefault("factor", positions / told["original_max_position_embeddings"])
            told.setdefault("attention_factor", _attention_factor(told["factor"], given))
        else:
            for name in _NEEDED.get(kind, ()):
                told[name] = number(given, name)
        theta = number(given if "rope_theta" in given else config, "rope_theta", cls().theta)
        return cls(theta, kind, **told)

    def to_hf(self) -> dict[str, Any]:
        """The keys that ``from_hf`` reads, as transformers 4 has them."""
        if self.kind == "default":
            return {"rope_theta": self.theta}
        scaling = {name: getattr(self, name) for name in _SETTINGS[self.kind]}
        return {"rope_theta": self.theta, "rope_scaling": {"rope_type": self.kind, **scaling}}


def _setting(given: Mapping[str, Any], name: str) -> Any:
    """A number of ``_SETTINGS``, or whether to truncate, as RopeConfig has it."""
    if name == "truncate":
        return bool(given[name])
    return whole_number(given, name) if name == "original_max_position_embeddings" else number(given, name)


def _attention_factor(factor: float, given: Mapping[str, Any]) -> float:
    """YaRN's, where a checkpoint does not say it."""

    def growth(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    if (scale := given.get("mscale")) and (of_all := given.get("mscale_all_dim")):
        return growth(scale) / growth(of_all)
    return growth(1)


def frequencies(head_dim: int, config: RopeConfig) -> Tensor:
    """Angular frequencies [d/2], float64."""
    plain = config.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if config.kind == "default":
        return plain
    return plain * (1 - _stretched(plain, head_dim, config) * (1 - 1 / config.factor))


def _stretched(plain: Tensor, head_dim: int, config: RopeConfig) -> Tensor:
    """How much of each frequency [d/2] is divided by the factor, from 0 to 1."""
    if config.kind == "linear":
        return torch.ones_like(plain)
    if config.kind == "llama3":
        turns = config.original_max_position_embeddings * plain / (2 * torch.pi)
        return ((config.high_freq_factor - turns) / (config.high_freq_factor - config.low_freq_factor)).clamp(0, 1)

    def pair(turns: float) -> float:
        """Which pair of dimensions turns so often within the original positions."""
        return head_dim * math.log(config.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    first, last = pair(config.beta_fast), pair(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    return ((torch.arange(head_dim // 2, dtype=torch.float64) - first) / max(last - first, 0.001)).clamp(0, 1)
