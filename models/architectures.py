"""Which networks there are, and what a ``config.json`` says of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.errors import CheckpointError
from models.reading import whole_number

PUBLISHED_MOA = "MOASpecLlamaForCausalLM"
"""What the authors call their drafters."""

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    PUBLISHED_MOA: "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Architectures and their families, which ``model_type`` names."""

SUPPORTED = ", ".join(sorted(set(ARCHITECTURES) - {PUBLISHED_MOA}))
"""The architectures of targets, for messages."""


def architecture(config: Mapping[str, Any]) -> str:
    """What a ``config.json`` says that its network is, be it by its model_type; raises CheckpointError where it says nothing."""
    names = config.get("architectures")
    if isinstance(names, list):
        names = names[0] if names else None
    if names:
        return str(names)
    kind = config.get("model_type")
    for name, family in ARCHITECTURES.items():
        if family == kind:
            return name
    raise CheckpointError(f"config.json has no 'architectures', and model_type {kind!r} says none of those supported: {SUPPORTED}")


def sliding_window(config: Mapping[str, Any], family: str) -> int | None:
    """How many positions some layer sees, by the rules of transformers' classes; None: all."""
    if family == "llama" or not config.get("sliding_window", 4096):
        return None
    window = whole_number(config, "sliding_window", 4096)
    if family == "mistral":
        return window
    kinds = config.get("layer_types")
    if kinds is not None:
        return window if "sliding_attention" in kinds else None
    full = whole_number(config, "max_window_layers", 28) >= whole_number(config, "num_hidden_layers")
    return window if config.get("use_sliding_window", False) and not full else None
