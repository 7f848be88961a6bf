"""Our networks -> checkpoints: drafters in the authors' published layout, targets as transformers reads them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from models.eagle import Eagle
from models.llama import Llama
from models.loader import MOA_EXTRAS, MOA_LAYERS, read_json
from models.moa import MoA
from models.published_layer import published_layer
from models.target_weights import KEY, weights_name

MAX_SHARD = "15MB"

TOKENIZER_FILES = ("tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")
"""What a tokenizer and its chat template may consist of."""


def save_drafter(
    drafter: MoA,
    folder: Path,
    *,
    made_for: Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    max_shard: str = MAX_SHARD,
) -> None:
    """Write a drafter in the authors' layout: sharded safetensors, and a config.json with the target's sizes and MoA's.

    config.json names the weights of the target in the folder ``made_for``, so that they are told from those of fine-tunes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for ours, theirs in MOA_LAYERS.items():
        if (layer := getattr(drafter, ours)) is not None:
            tensors.update(published_layer(layer, f"{theirs}."))
    tensors["Ekv2E.weight"] = drafter.to_memory.weight
    if drafter.to_memory.bias is not None:
        tensors["Ekv2E.bias"] = drafter.to_memory.bias
    for ours, theirs in MOA_EXTRAS.items():
        if (module := getattr(drafter, ours)) is not None:
            tensors.update({f"{theirs}.{name}": parameter for name, parameter in module.named_parameters()})
    if drafter.draft_vocabulary is not None:
        tensors["draft_vocabulary"] = drafter.draft_vocabulary.to(torch.int32)
    _save(tensors, folder, dtype, max_shard)
    target = drafter.config.target
    config = {
        "architectures": ["MOASpecLlamaForCausalLM"],
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": target.num_layers,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope.theta,
        **drafter.config.to_hf(),
        **_named(made_for),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def save_eagle(drafter: Eagle, folder: Path, *, made_for: Path | None = None, dtype: torch.dtype = torch.bfloat16) -> None:
    """The same of an EAGLE drafter, under our own names."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = dict(drafter.named_parameters())
    if drafter.draft_vocabulary is not None:
        tensors["draft_vocabulary"] = drafter.draft_vocabulary.to(torch.int32)
    _save(tensors, folder, dtype)
    (folder / "config.json").write_text(json.dumps(drafter.config.to_hf() | _named(made_for), indent=2) + "\n", encoding="utf-8")


def save_target(target: Llama, folder: Path, base: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a target as sharded safetensors; all but the sizes, tokenizer and settings included, is taken from ``base``."""
    config = target.config
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {
        "model.embed_tokens.weight": target.embedding.weight,
        "model.norm.weight": target.norm.weight,
    }
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = target.lm_head.weight
    for index, layer in enumerate(target.borrowed(0)):
        tensors.update(published_layer(layer, f"model.layers.{index}."))
    _save(tensors, folder, dtype)
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps({**read_json(base, "config.json"), **sizes}, indent=2) + "\n", encoding="utf-8")
    copy_settings(base, folder)


def copy_settings(base: Path, folder: Path) -> None:
    """Copy a target's tokenizer, chat template and generation defaults."""
    for pattern in (*TOKENIZER_FILES, "generation_config.json"):
        for file in base.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def write_weights(tensors: dict[str, Tensor], folder: Path, max_shard: str) -> None:
    """Tensors as sharded safetensors, in a folder that exists.

    safetensors lets nobody but the owner read its files; models are also read by servers that run as somebody else.
    """
    save_torch_state_dict(tensors, folder, max_shard_size=max_shard)
    mask = os.umask(0o077)
    os.umask(mask)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o666 & ~mask)


def _named(target: Path | None) -> dict[str, str]:
    return {} if target is None else {KEY: weights_name(target)}


def _save(tensors: dict[str, Tensor], folder: Path, dtype: torch.dtype, max_shard: str = MAX_SHARD) -> None:
    """Integers stay what they are."""
    kept = {
        name: x.detach().to("cpu", dtype if x.is_floating_point() else x.dtype, copy=True).contiguous()
        for name, x in tensors.items()
    }
    write_weights(kept, folder, max_shard)
