"""Another drafter out of a trained one, to be trained on: its MLPs cut to their strongest units, or a block added."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from models.layers import MLP
from models.moa import MoA
from training.errors import ConfigError

_MLPS = {"lsa_intermediate_size": "lsa", "sa_intermediate_size": "sa", "ca_intermediate_size": "ca"}
_BLOCK = ("draft_block_size", "draft_block_intermediate_size")


def narrowed(moa: MoA, sizes: Mapping[str, int]) -> MoA:
    """The drafter with the given MoAConfig sizes; raises ConfigError for one that cannot be had so."""
    # A block can be added to a drafter that has none: the rest goes on as it was trained.
    added = {} if moa.block is not None else {name: size for name, size in sizes.items() if name in _BLOCK}
    if "draft_block_size" in added:
        added = {"draft_block_intermediate_size": moa.config.target.hidden_size, **added}
    for name, size in sizes.items():
        current = getattr(moa.config, name)
        if size != current and name not in added and (name not in _MLPS or size > current):
            raise ConfigError(
                f"--init-from has {name} = {current}, which cannot become {size}: only MLPs can change, and only shrink"
            )
    config = dataclasses.replace(moa.config, **dict[str, Any]({**sizes, **added}))
    if config == moa.config:
        return moa
    smaller = MoA(config).to(moa.to_memory.weight)
    for layer in _MLPS.values():
        _cut(getattr(moa, layer).mlp, getattr(smaller, layer).mlp)
    kept = {name: tensor for name, tensor in moa.state_dict().items() if ".mlp." not in name}
    smaller.load_state_dict({**smaller.state_dict(), **kept})
    smaller.draft_vocabulary = moa.draft_vocabulary
    return smaller


@torch.no_grad()
def _cut(source: MLP, target: MLP) -> None:
    """Copy the units whose weights have the largest products of norms; biases go along."""
    strength = source.gate_up.weight.norm(dim=1).view(2, -1).prod(dim=0) * source.down.weight.norm(dim=0)
    units = strength.topk(target.intermediate_size).indices.sort().values
    both = torch.cat((units, units + source.intermediate_size))
    _copy(target.gate_up.weight, source.gate_up.weight[both])
    _copy(target.down.weight, source.down.weight[:, units])
    _copy(target.gate_up.bias, source.gate_up.bias[both] if source.gate_up.bias is not None else None)
    _copy(target.down.bias, source.down.bias)


def _copy(target: nn.Parameter | None, source: torch.Tensor | None) -> None:
    if target is not None and source is not None:
        target.copy_(source)
