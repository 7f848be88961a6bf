"""What identifies a network's weights."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class Digest(Protocol):
    """A hash in the making, of hashlib's kind."""

    def update(self, data: bytes, /) -> None:
        """Take in bytes."""


def digest_weights(module: nn.Module, digest: Digest) -> None:
    """Feed names, types, shapes and bytes of all weights to ``digest``."""
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
