"""Activations from disk: of the conversations of a batch, those rows alone are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.config import DecoderConfig
from models.llama import TargetActivations
from training.activations.index import Facts, Plan, shard_path
from training.batches import Indices
from training.corpus import Corpus, stored
from training.errors import ConfigError, DataError
from training.needs import Needs

OPEN_SHARDS = 256
"""Files that are kept open; a batch may read from as many as it has conversations."""


class KeptActivations:
    """As ``training.needs.Activations``; numbers are given as ``dtype``, whatever they are kept as."""

    def __init__(self, folder: Path, facts: Facts, plan: Plan, target: DecoderConfig, dtype: torch.dtype) -> None:
        self.folder, self.facts, self.plan, self.target, self.dtype = folder, facts, plan, target, dtype
        self._shard: Any = lru_cache(OPEN_SHARDS)(self._open)

    @property
    def batches(self) -> Sequence[Indices]:
        """As in Activations."""
        return self.plan.batches

    def check(self, needs: Needs) -> None:
        """As in Activations."""
        if lacking := needs.lacking(self.facts.needs):
            raise ConfigError(
                f"the activations in {self.folder} lack {' and '.join(lacking)}: make others, with the --method and the "
                "--layers-inferred of this drafter"
            )

    def read(self, conversations: Indices, lengths: Sequence[int], length: int) -> TargetActivations:
        """As in Activations; of a target whose keys and values were not kept ``kv`` has no layers."""
        shards, starts = self.plan.places
        widths = self.facts.needs.widths(self.target)
        parts = {name: torch.zeros(len(conversations), length, width, dtype=self.dtype) for name, width in widths.items()}
        for row, (conversation, count) in enumerate(zip(conversations, lengths, strict=True)):
            start = int(starts[conversation])
            shard = self._shard(int(shards[conversation]))
            for name, part in parts.items():
                part[row, :count] = shard.get_slice(name)[start : start + count]
        kv = parts.pop("kv", parts["hidden"][..., :0])
        return TargetActivations(kv.unflatten(-1, (-1, self.target.kv_size)), **_optional(parts))

    def _open(self, number: int) -> Any:
        path = shard_path(self.folder, number)
        try:
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{path} is damaged ({error}): delete it, and run the same moaserve activations again to make it anew"
            ) from error


def _optional(parts: dict[str, Tensor]) -> dict[str, Any]:
    return {"layer_input": None, "tapped": None, **parts}


def open_activations(folder: Path, target: DecoderConfig, target_digest: str, max_length: int, dtype: torch.dtype) -> Corpus:
    """The corpus of a folder, its activations with it.

    Raises ConfigError where they are another target's, not all there, or of shorter conversations than ``max_length``.
    """
    facts = Facts.read(folder)
    if facts.target != target_digest:
        raise ConfigError(f"the activations in {folder} are another target's: give the --target that they were made with")
    try:
        corpus = stored(folder / facts.corpus)
    except DataError as error:
        raise DataError(f"{error}: run the same moaserve activations again, which writes it anew") from error
    plan = Plan.read(folder, corpus, facts.max_length)
    if max_length > facts.max_length and int(np.diff(corpus.offsets).max()) > facts.max_length:
        raise ConfigError(
            f"the activations in {folder} end at {facts.max_length} tokens of a conversation: say --max-length {facts.max_length}"
        )
    missing = [number for number in range(len(plan.shards)) if not shard_path(folder, number).exists()]
    if missing:
        raise ConfigError(
            f"{folder} lacks {len(missing)} of {len(plan.shards)} shards: run the same moaserve activations again, it goes on there"
        )
    return dataclasses.replace(corpus, activations=KeptActivations(folder, facts, plan, target, dtype))
