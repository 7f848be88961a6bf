"""EAGLE drafters, for comparison: one decoder layer that goes from feature to feature.

EAGLE-2 (arXiv 2406.16858) reads a token's embedding beside the target's final hidden state of the token before it and foretells
the next hidden state, which is what it reads at the next step. EAGLE-3 (arXiv 2503.01840) fuses hidden states of a low, a middle
and the top layer, is free in what it hands on, and is trained on its own outputs. Embeddings and LM head are the target's and
frozen; this EAGLE-3 has no LM head of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.config import DecoderConfig
from models.errors import CheckpointError
from models.layers import DecoderLayer, Linear, RMSNorm, Rope, RotaryTable, keys_values
from models.rope import RopeConfig

ARCHITECTURE = "MoAServeEagleDrafter"


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Sizes of an EAGLE drafter for one target; ``generation`` is 2 or 3.

    ``taps`` are the numbers of target layers whose outputs it reads; the target's number of layers stands for its final hidden
    state, norm included.
    """

    target: DecoderConfig
    generation: int
    num_kv_heads: int
    intermediate_size: int

    def __post_init__(self) -> None:
        """Refuse what does not fit."""
        if self.generation not in (2, 3):
            raise CheckpointError(f"there is no EAGLE of generation {self.generation} here (2 and 3 are)")
        if self.target.num_heads % self.num_kv_heads:
            raise CheckpointError(f"num_key_value_heads={self.num_kv_heads} does not divide the {self.target.num_heads} heads")

    @property
    def taps(self) -> tuple[int, ...]:
        """Low, middle and top as the authors choose them."""
        layers = self.target.num_layers
        return (layers,) if self.generation == 2 else (min(2, layers - 1), layers // 2, layers)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: DecoderConfig) -> EagleConfig:
        """Read a ``config.json`` that ``to_hf`` gave."""
        try:
            return cls(
                target,
                int(config["eagle_generation"]),
                int(config["draft_num_key_value_heads"]),
                int(config["draft_intermediate_size"]),
            )
        except KeyError as error:
            raise CheckpointError(f"not an EAGLE drafter: config.json has no {error.args[0]!r}") from None

    def to_hf(self) -> dict[str, Any]:
        """What identifies the drafter, and the sizes of the target that it belongs to."""
        return {
            "architectures": [ARCHITECTURE],
            "vocab_size": self.target.vocab_size,
            "hidden_size": self.target.hidden_size,
            "num_hidden_layers": self.target.num_layers,
            "eagle_generation": self.generation,
            "draft_num_key_value_heads": self.num_kv_heads,
            "draft_intermediate_size": self.intermediate_size,
        }


class Eagle(nn.Module):
    """One class for training and serving; ``draft_vocabulary`` as in ``MoA``."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        target, third = config.target, config.generation == 3
        size, eps = target.hidden_size, target.rms_norm_eps
        self.fuse = Linear(len(config.taps) * size, size) if third else None
        self.embedding_norm = RMSNorm(size, eps) if third else None
        self.feature_norm = RMSNorm(size, eps) if third else None
        self.combine = Linear(2 * size, size, bias=not third)
        self.layer = DecoderLayer(size, target.num_heads, config.num_kv_heads, target.head_dim, config.intermediate_size, eps)
        self.norm = RMSNorm(size, eps) if third else None
        self.rotary = RotaryTable(target.head_dim, RopeConfig(theta=target.rope.theta))
        self.draft_vocabulary: Tensor | None = None

    def known(self, tapped: Tensor) -> Tensor:
        """What the target says of verified tokens [n, taps·E] -> their features [n, E]."""
        out: Tensor = tapped if self.fuse is None else self.fuse(tapped)
        return out

    def inputs(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """Tokens' embeddings, and the features of the tokens before them [n, E] -> what enters the layer [n, E]."""
        if self.embedding_norm is not None and self.feature_norm is not None:
            embeddings, features = self.embedding_norm(embeddings), self.feature_norm(features)
        out: Tensor = self.combine(torch.cat((embeddings, features), dim=-1))
        return out

    def keys_values(self, inputs: Tensor, rope: Rope) -> Tensor:
        """Rotated keys and values [n, 2·n_kv·d] of inputs [n, E]; one layer, so they depend on nothing else."""
        return keys_values(self.layer, inputs, rope)

    def entering(self, features: Tensor) -> Tensor:
        """The layer's output, a token's own feature [n, E] -> what enters the LM head."""
        out: Tensor = features if self.norm is None else self.norm(features)
        return out
