"""A MoA drafter's memory by one operator; see ``models/drafter_memory.cpp``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from models import tiled_linear
from models.entry import PairedEntry
from models.layers import DecoderLayer, Linear
from models.tiled_decoder import layer_tensors
from models.tiles import TYPES, has_operators, operator_class
from speculative.drafters.moa_network import MoANetwork


class TiledMemory(NamedTuple):
    """``MoANetwork``'s ``remember`` and, where memory is paired, its ``pair``; written are the drafter's caches.

    Both get tokens [4, n] (ids, those before them, slots, positions); the first with an entry also the target's final hidden states
    [n, E], and the target's layers' windows; both the windows of the drafter's caches, and the scratch rows of the target's slots
    and of each cache's. ``remember_rows`` gets tokens [4·n] in one list, and the rows in which their hidden states stand among
    others'. ``draft``, of an operator that drafts as ``tiled_block`` has it, pairs the newest memory first, if memory is paired.
    """

    remember: Callable[[Tensor, list[Tensor], list[Tensor], list[Tensor], list[int]], None]
    remember_rows: Callable[[list[int], list[Tensor], list[int], list[Tensor], list[Tensor], list[int]], None]
    pair: Callable[[Tensor, list[Tensor], list[int]], None]
    draft: Callable[..., Any]


_MOST_LAYERS, _LARGEST_HEAD = 64, 256


def suits(network: MoANetwork) -> bool:
    """Whether the operator does what ``MoANetwork.remember`` does."""
    moa, config, lsa = network.moa, network.target.config, network.moa.lsa
    if lsa is None or not has_operators() or network.dtype not in TYPES or network.target.dtype != network.dtype:
        return False
    if config.num_layers > _MOST_LAYERS or lsa.head_dim > _LARGEST_HEAD or lsa.head_dim % 16:
        return False
    if moa.config.sa_num_kv_heads != moa.config.ca_num_kv_heads or moa.to_memory.bias is None:
        return False
    products = [module for module in (*lsa.modules(), moa.sa.qkv, moa.ca.qkv) if isinstance(module, Linear)]
    if moa.entry is not None:
        products += [module for module in moa.entry.modules() if isinstance(module, Linear)]
    without_bias = all(linear.bias is None for linear in products)
    return without_bias and all(tiled_linear.suits(linear.weight) for linear in (*products, moa.to_memory))


def tiled_memory(network: MoANetwork, length: int) -> TiledMemory:
    """Stands in for what makes memory, with a copy of the weights, for texts of up to ``length`` tokens.

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
    if isinstance(moa.entry, PairedEntry):
        tensors += [moa.entry.hidden_norm.weight, moa.entry.pair_norm.weight]
        tensors += [tiled_linear.tiled(x.weight) for x in (moa.entry.from_own, moa.entry.from_before, moa.entry.from_following)]
    dense = [tensor.detach().to(network.dtype if tensor.dim() < 6 else tensor.dtype).contiguous() for tensor in tensors]
    # What SA keeps, LSA, what leads to memory, what CA keeps.
    tiled_linear.put_in_order(dense, (5, 6, *range(11, 17), 3, *range(17, len(dense)), 7, 8))
    sizes = (moa.config.sa_num_kv_heads, config.head_dim, moa.config.lsa_num_kv_heads, lsa.head_dim)
    operator = operator_class("DrafterMemory", network.dtype)(dense, *sizes, config.rms_norm_eps)
    return TiledMemory(operator.remember, operator.remember_rows, operator.pair, operator.draft)


def _telling(layer: DecoderLayer) -> list[Tensor]:
    """What makes keys and values of a layer's input."""
    return [layer.input_norm.weight, tiled_linear.tiled(layer.qkv.weight[layer.q_size :])]
