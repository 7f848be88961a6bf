"""A block drafter's trees by one operator; see ``models/block_drafter.cpp``."""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models import cached_attention, tiled_linear
from models.copying import CopyingHead
from models.layers import DecoderLayer, Linear
from models.tiled_decoder import in_turns, layer_tensors
from models.tiles import in_rows, operator_class
from speculative.drafters.growth import CANDIDATES
from speculative.drafters.moa_network import DraftNetwork
from speculative.drafters.tiled_memory import TiledMemory
from speculative.drafters.tree_drafter import DraftTrees, Nodes


def suits(network: DraftNetwork, breadth: int) -> bool:
    """Whether the operator does what ``network`` does."""
    moa, config = network.moa, network.target.config
    if moa.block is None or moa.config.target_layer_inference or not moa.config.attends_to_all_memory:
        return False
    if not cached_attention.suits(network.dtype, config.head_dim) or network.target.dtype != network.dtype:
        return False
    copying = () if moa.block.copying is None else tuple(moa.block.copying.modules())  # filled up to whole panels
    parts = (part for part in (moa.sa, moa.ca, moa.block, moa.entry) if part)
    products = [module for part in parts for module in part.modules() if isinstance(module, Linear) and module not in copying]
    kv_heads = {moa.config.sa_num_kv_heads, moa.config.ca_num_kv_heads}
    return (
        len(kv_heads) == 1
        and all(linear.bias is None and tiled_linear.suits(linear.weight) for linear in (*products, network.head.frequent))
        and max(breadth, CANDIDATES) <= network.head.frequent.weight.shape[0]
    )


def tiled_drafting(network: DraftNetwork, length: int, memory: TiledMemory | None = None, scratches: Many[int] = ()) -> DraftTrees:
    """Stands in for drafting level by level, with a copy of the weights, for texts of up to ``length`` tokens.

    With ``memory``, of caches with so many ``scratches`` (rows; one number for the target's, then each's), the newest memory of
    texts is paired first, where memory is. ``graph_runner.load_runner`` must have been called. Other threads go on while it runs.
    """
    moa, config, block, target = network.moa, network.target.config, network.moa.block, network.target
    assert block is not None
    moa.rotary.reserve(length + block.size, moa.sa.input_norm.weight)
    cos, sin = moa.rotary(torch.arange(length + block.size))
    ids = torch.arange(config.vocab_size) if moa.draft_vocabulary is None else moa.draft_vocabulary
    tensors = [
        target.embeddings,
        cos[:, 0, 0],
        sin[:, 0, 1],
        tiled_linear.tiled(network.head.frequent.weight),
        ids,
        target.embeddings if moa.draft_vocabulary is None else network.head.whole.weight,
        block.stand_ins,
        block.state_norm.weight,
        tiled_linear.tiled(in_turns(block.from_state.weight)),
        block.feature_norm.weight,
        tiled_linear.tiled(in_turns(block.from_feature.weight)),
        tiled_linear.tiled(block.down.weight),
        *layer_tensors(moa.sa),
        *_asking(moa.ca),
        block.token_norm.weight,
        tiled_linear.tiled(in_turns(block.from_token.weight)),
    ]
    if moa.entry is not None:
        tensors += [moa.entry.token_norm.weight, tiled_linear.tiled(moa.entry.from_token.weight)]
    if moa.entry is not None and moa.entry.from_previous is not None and block.copying is not None:
        tensors += [tiled_linear.tiled(moa.entry.from_previous.weight), *_copying(block.copying)]
    dense = [tensor.detach().contiguous() for tensor in tensors]
    # SA up to its queries, the entry, what is left of SA, CA, the features' part in steps; then what each level reads.
    entry, copying = range(26, min(len(dense), 29)), range(32, len(dense))
    tiled_linear.put_in_order(dense, (12, 13, *entry, *range(14, 24), 9, 10, 7, 8, 11, *copying, 3))
    sizes = moa.config.sa_num_kv_heads, config.head_dim, config.rms_norm_eps
    drafter = operator_class("BlockDrafter", network.dtype)(dense, *sizes)
    draft = drafter.draft if memory is None else partial(memory.draft, drafter, list(scratches))

    def trees(windows: list[Tensor], texts: list[list[int]], rare: list[list[int]], *others: Any) -> Nodes:
        tokens, parents, probabilities = draft(windows, list(chain.from_iterable(texts)), rare, *others)
        return in_rows(tokens, len(rare)), in_rows(parents, len(rare)), in_rows(probabilities, len(rare))

    return trees


def _copying(head: CopyingHead) -> list[Tensor]:
    """What copying reads, filled up to whole panels."""
    missing = -head.output.weight.shape[1] % tiled_linear.PANEL
    return [
        head.token_norm.weight,
        tiled_linear.tiled(F.pad(head.from_token.weight, (0, 0, 0, missing))),
        tiled_linear.tiled(F.pad(head.from_previous.weight, (0, 0, 0, missing))),
        tiled_linear.tiled(F.pad(head.output.weight, (0, missing))),
    ]


def _asking(layer: DecoderLayer) -> list[Tensor]:
    """A cross-attention layer's tensors: of its first weight the queries alone."""
    norm, _, *others = layer_tensors(layer)
    return [norm, tiled_linear.tiled(layer.qkv.weight[: layer.q_size]), *others]
