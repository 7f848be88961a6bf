"""What identifies a network's weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

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


@dataclass(frozen=True, slots=True)
class WeightSample:
    """Some ``numbers`` [n], by ``sample_places``, of a weight."""

    name: str
    shape: tuple[int, ...]
    numbers: Tensor


def sample_places(count: int) -> range:
    """Those of the numbers that stand for ``count``."""
    return range(0, count, max(1, count // SAMPLED))


def weight_samples(module: nn.Module) -> Iterator[WeightSample]:
    """Of all weights, by name."""
    for name, tensor in sorted(module.state_dict().items()):
        yield sample_of(name, tensor)


def sample_of(name: str, tensor: Tensor) -> WeightSample:
    """Of one weight, called ``name``."""
    flat = tensor.detach().flatten()
    return WeightSample(name, tuple(tensor.shape), flat[:: sample_places(len(flat)).step])


def digest_samples(samples: Iterable[WeightSample], digest: Digest, *, dtype: torch.dtype | None = None) -> None:
    """Feed names, types, shapes and some numbers of each weight to ``digest``: enough to tell models apart, at any size at once.

    With a ``dtype`` they are fed as numbers of that type, so that it does not matter which of the more exact ones they have.
    """
    for sample in samples:
        digest.update(f"{sample.name} {dtype or sample.numbers.dtype} {sample.shape}".encode())
        some = sample.numbers.to(dtype or sample.numbers.dtype).cpu().contiguous()
        digest.update(some.view(torch.uint8).numpy().tobytes())
