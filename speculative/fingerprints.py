"""What names the networks of an engine, as they were loaded: whose caches, bundles and texts it can share."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import nn

from models.digest import digest_samples, weight_samples
from models.llama import Llama


def pair_fingerprint(target: Llama, network: nn.Module | None) -> str:
    """What names the weights of a target and its drafter, as they were loaded: the same for float32 as for bfloat16.

    Configurations are left out: bundles bear this name, and those that are about shall keep theirs.
    """
    return _weights_digest(_networks(target, network), torch.bfloat16).hexdigest()


def fingerprint(target: Llama, network: nn.Module | None) -> str:
    """What names the contents of key-value caches: the weights that they come from, their numbers' types, and configurations.

    The same weights with another RoPE or another epsilon make other keys and values.
    """
    networks = _networks(target, network)
    digest = _weights_digest(networks)
    for each in networks:
        digest.update(repr(each.config).encode())
    return digest.hexdigest()


def _networks(target: Llama, network: nn.Module | None) -> list[nn.Module]:
    return [each for each in (target, network) if each is not None]


def _weights_digest(networks: list[nn.Module], dtype: torch.dtype | None = None) -> blake2b:
    """Of some numbers of all weights, as they are or as if they were of ``dtype``."""
    digest = blake2b(digest_size=16)
    for module in networks:
        samples = module.weight_samples() if isinstance(module, Llama) else weight_samples(module)
        digest_samples(samples, digest, dtype=dtype)
    return digest
