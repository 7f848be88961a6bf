"""A MoA drafter's memory by one operator where the CPU multiplies bfloat16; see ``models/drafter_memory.cpp``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from models import tiled_linear
from models.layers import DecoderLayer, Linear
from models.tiled_decoder import layer_tensors
from models.tiles import has_tiles
from speculative.drafters.moa_network import MoANetwork

Remember = Callable[[Tensor, list[Tensor], list[Tensor], list[Tensor], list[int]], None]
"""Tokens [3, n] (ids, slots, positions), with an entry the target's final hidden states [n, E], the target's layers' windows, the
drafter's caches' windows, and the scratch rows of the target's slots and of each cache's: written are the drafter's caches."""

_MOST_LAYERS, _LARGEST_HEAD = 64, 256


def suits(network: MoANetwork) -> bool:
    """Whether the operator does what ``MoANetwork.remember`` does."""
    moa, config, lsa = network.moa, network.target.config, network.moa.lsa
    if lsa is None or moa.config.paired or not has_tiles() or {network.dtype, network.target.dtype} != {torch.bfloat16}:
        return False
    if config.num_layers > _MOST_LAYERS or lsa.head_dim > _LARGEST_HEAD or lsa.head_dim % 16:
        return False
    if moa.config.sa_num_kv_heads != moa.config.ca_num_kv_heads or moa.to_memory.bias is None:
        return False
    products = [module for module in (*lsa.modules(), moa.sa.qkv, moa.ca.qkv) if isinstance(module, Linear)]
    if moa.entry is not None:
        products.append(moa.entry.from_hidden)
    without_bias = all(linear.bias is None for linear in products)
    return without_bias and all(tiled_linear.suits(linear.weight) for linear in (*products, moa.to_memory))


def tiled_memory(network: MoANetwork, length: int) -> Remember:
    """Stands in for ``MoANetwork.remember``, with a copy of the weights, for texts of up to ``length`` tokens.

    ``graph_runner.load_runner`` must have been called. Other threads go on while it runs.
    """
    moa, config, lsa, to_memory = network.moa, network.target.config, network.moa.lsa, network.moa.to_memory
    assert lsa is not None and to_memory.bias is not None and moa.reads_cache_layout
    moa.rotary.reserve(length, moa.sa.input_norm.weight)
    moa.layer_rotary.reserve(config.num_layers, to_memory.weight)
    (cos, sin), (layer_cos, layer_sin) = moa.rotary(torch.arange(length)), moa.layer_rotary(torch.arange(config.num_layers))
    tensors = [
        network.target.embeddings,
        cos[:, 0, 0],
        sin[:, 0, 1],
        tiled_linear.tiled(to_memory.weight),
        to_memory.bias,
        *_telling(moa.sa),
        *_telling(moa.ca),
        layer_cos[:, 0, 0],
        layer_sin[:, 0, 1],
        *layer_tensors(lsa),
    ]
    if moa.entry is not None:
        tensors.append(tiled_linear.tiled(moa.entry.from_hidden.weight))
    dense = [tensor.detach().to(torch.bfloat16).contiguous() for tensor in tensors]
    # What SA keeps, LSA, what leads to memory, what CA keeps.
    tiled_linear.put_in_order(dense, (5, 6, *range(11, 17), 3, *range(17, len(dense)), 7, 8))
    sizes = (moa.config.sa_num_kv_heads, config.head_dim, moa.config.lsa_num_kv_heads, lsa.head_dim)
    remember: Remember = torch.classes.moaserve.DrafterMemory(dense, *sizes, config.rms_norm_eps).remember
    return remember


def _telling(layer: DecoderLayer) -> list[Tensor]:
    """What makes keys and values of a layer's input."""
    return [layer.input_norm.weight, tiled_linear.tiled(layer.qkv.weight[layer.q_size :])]
