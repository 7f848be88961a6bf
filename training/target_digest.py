"""What identifies a target's checkpoint, without loading it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from models.digest import WeightSample, digest_samples, sample_of
from models.loader import open_tensors, target_config, tensor_files


def checkpoint_digest(folder: Path) -> str:
    """Identifies the target in a checkpoint folder, by its sizes and samples of its weights as they are on disk."""
    digest = hashlib.sha256(repr(target_config(folder)).encode())
    digest_samples(_samples(folder), digest)
    return digest.hexdigest()[:24]


def _samples(folder: Path) -> Iterator[WeightSample]:
    for path in tensor_files(folder):
        with open_tensors(path) as tensors:
            for name in sorted(tensors.keys()):
                yield sample_of(name, tensors.get_tensor(name))
