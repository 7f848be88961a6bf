"""What identifies a network's weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from models.loader import target_config, tensor_files

SAMPLED = 1024
"""Numbers of each weight that ``digest_samples`` reads: training changes nearly all of them."""


class Digest(Protocol):
    """A hash in the making, of hashlib's kind."""

    def update(self, data: bytes, /) -> None:
        """Take in bytes."""


def digest_weights(module: nn.Module, digest: Digest) -> None:
    """Feed names, types, shapes and bytes of all weights to ``digest``."""
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def digest_samples(module: nn.Module, digest: Digest, *, dtype: torch.dtype | None = None) -> None:
    """Feed names, types, shapes and some numbers of each weight to ``digest``: enough to tell models apart, at any size at once.

    With a ``dtype`` they are fed as numbers of that type, so that it does not matter which of the more exact ones they have.
    """
    for name, tensor in sorted(module.state_dict().items()):
        digest_sample(name, tensor.detach(), digest, dtype=dtype)


def digest_sample(name: str, tensor: Tensor, digest: Digest, *, dtype: torch.dtype | None = None) -> None:
    """Feed a tensor's name, type, shape and some of its numbers to ``digest``."""
    digest.update(f"{name} {dtype or tensor.dtype} {tuple(tensor.shape)}".encode())
    flat = tensor.flatten()
    some = flat[:: max(1, len(flat) // SAMPLED)].to(dtype or tensor.dtype).cpu().contiguous()
    digest.update(some.view(torch.uint8).numpy().tobytes())


def checkpoint_digest(folder: Path) -> str:
    """Identifies the target in a checkpoint folder, by its sizes and samples of its weights as they are on disk."""
    digest = hashlib.sha256(repr(target_config(folder)).encode())
    for path in tensor_files(folder):
        with safe_open(path, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                digest_sample(name, tensors.get_tensor(name), digest)
    return digest.hexdigest()[:24]
