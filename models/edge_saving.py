"""A target and its drafter -> the folder that an edge drafts from (``edge_bundle``)."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from models.durable import workshop_beside
from models.edge import edge_weights
from models.edge_bundle import (
    ARCHITECTURE,
    DRAFT_VOCABULARY,
    FORMAT_VERSION,
    BundleConfig,
    DType,
    Quantization,
    digest_of,
    empty_networks,
    is_bundle,
    is_quantized,
)
from models.errors import CheckpointError
from models.int8 import quantize
from models.llama import Llama
from models.loader import read_json
from models.moa import MoA
from models.saving import MAX_SHARD, TOKENIZER_FILES, copy_settings, write_weights


def write_bundle(
    folder: Path,
    target: Llama,
    drafter: MoA,
    base: Path,
    *,
    name: str,
    fingerprint: str,
    eos_token_ids: frozenset[int],
    dtype: DType = "bfloat16",
    quantization: Quantization | None = None,
    max_shard: str = MAX_SHARD,
) -> None:
    """Write a bundle into a folder that is new, empty or an earlier bundle, which it replaces; its other files stay.

    Tokenizer and settings are taken from the target's folder ``base``. Raises CheckpointError for drafters that cannot draft on an
    edge, and for folders that hold something else; nothing is left behind where it fails.
    """
    folder = folder.resolve()
    tensors = _bundled(target, drafter, getattr(torch, dtype), quantization)
    if drafter.draft_vocabulary is not None:
        tensors[DRAFT_VOCABULARY] = drafter.draft_vocabulary.to("cpu", torch.int32)
    stale = _files_of(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with workshop_beside(folder) as made:
        write_weights(tensors, made, max_shard)
        weights = list(made.iterdir())
        copy_settings(base, made)
        fixed = [*weights, *(file for pattern in TOKENIZER_FILES for file in made.glob(pattern))]
        config = BundleConfig(
            architectures=[ARCHITECTURE],
            format_version=FORMAT_VERSION,
            name=name,
            dtype=dtype,
            quantization=quantization,
            fingerprint=fingerprint,
            max_model_len=target.config.max_position_embeddings,
            eos_token_ids=sorted(eos_token_ids),
            draft_vocabulary_size=None if drafter.draft_vocabulary is None else len(drafter.draft_vocabulary),
            target=target.config.to_hf(),
            drafter=drafter.config.to_hf(),
            files={file.name: digest_of(file) for file in sorted(fixed)},
            model_type=read_json(base, "config.json").get("model_type"),
        )
        folder.mkdir(exist_ok=True)
        for old in stale:
            old.unlink(missing_ok=True)
        for file in made.iterdir():
            file.replace(folder / file.name)
    # Last: without it the folder is no bundle.
    (folder / "config.json").write_text(json.dumps(msgspec.to_builtins(config), indent=2) + "\n", encoding="utf-8")


def _bundled(target: Llama, drafter: MoA, dtype: torch.dtype, quantization: Quantization | None) -> dict[str, Tensor]:
    """The tensors as they are stored: those of two names once, on the CPU, of this type or quantized."""
    places = empty_networks(target.config, drafter.config, quantization, dtype=dtype).state_dict()
    stored: dict[str, Tensor] = {}
    for name, tensor in edge_weights(target, drafter).items():
        if target.config.tie_word_embeddings and name.startswith("target.lm_head."):
            continue
        if is_quantized(name, places):
            stored[name], stored[_scales_of(name)] = (each.cpu() for each in quantize(tensor))
        else:
            stored[name] = tensor.to("cpu", dtype, copy=True).contiguous()
    return stored


def _scales_of(weight: str) -> str:
    return f"{weight.removesuffix('weight')}scales"


def _files_of(folder: Path) -> list[Path]:
    """What an earlier bundle in ``folder`` consists of; raises CheckpointError for a folder of something else."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file")
    if not folder.exists() or not any(folder.iterdir()):
        return []
    if not is_bundle(folder):
        raise CheckpointError(f"{folder} holds something else than a bundle")
    names = ["config.json", *(read_json(folder, "config.json").get("files") or {})]
    return [folder / name for name in names if Path(name).name == name]
