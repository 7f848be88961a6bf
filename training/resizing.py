"""Another drafter out of a trained one, to be trained on: with MLPs of other widths, or with a block added."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from models.block import BlockHead
from models.entry import PairedEntry
from models.layers import MLP, Linear
from models.moa import MoA
from training.copying import copy_as_trained
from training.errors import ConfigError
from training.tasks.base import Task

_MLPS = {
    "lsa_intermediate_size": "lsa.mlp",
    "sa_intermediate_size": "sa.mlp",
    "ca_intermediate_size": "ca.mlp",
    "draft_block_intermediate_size": "block",
}
_BLOCK = ("draft_block_size", "draft_block_intermediate_size")


def resized(moa: MoA, sizes: Mapping[str, int]) -> MoA:
    """The drafter with the given MoAConfig sizes; raises ConfigError for one that cannot be had so.

    An MLP that shrinks keeps its strongest units; one that grows gets units that add nothing until they are trained.
    """
    # A block can be added to a drafter that has none: the rest goes on as it was trained.
    added = {} if moa.block is not None else {name: size for name, size in sizes.items() if name in _BLOCK}
    if "draft_block_size" in added:
        added = {"draft_block_intermediate_size": moa.config.target.hidden_size, **added}
    for name, size in sizes.items():
        current = getattr(moa.config, name)
        if size != current and name not in added and name not in _MLPS:
            raise ConfigError(f"--init-from has {name} = {current}, which cannot become {size}: only the widths of MLPs can change")
    config = dataclasses.replace(moa.config, **dict[str, Any]({**sizes, **added}))
    if config == moa.config:
        return moa
    other = MoA(config).to(moa.to_memory.weight)
    current, wanted = moa.state_dict(), other.state_dict()
    # A block does without the norm of what leaves CA: its head has norms of its own.
    kept = {name: x for name, x in current.items() if name in wanted and x.shape == wanted[name].shape}
    other.load_state_dict({**wanted, **kept})
    if "draft_block_size" in added:
        copy_as_trained(other)
    for name, part in _MLPS.items():
        if name not in added and getattr(config, name) != getattr(moa.config, name):
            _refit(moa.get_submodule(part), other.get_submodule(part))
    other.draft_vocabulary = moa.draft_vocabulary
    return other


@torch.no_grad()
def do_without_norm(moa: MoA, task: Task) -> None:
    """Let what leaves CA be about as large as its norm makes it, for a drafter that will have a block, and that norm no more.

    A batch of ``task``, which trains ``moa``, says how large that is. Without this the LM head is told several times too much.
    """
    assert moa.output_norm is not None and isinstance(moa.entry, PairedEntry)
    shares: list[Tensor] = []

    def note(_: nn.Module, inputs: tuple[Tensor], out: Tensor) -> None:
        shares.append(out.float().norm() / inputs[0].float().norm())

    hook = moa.output_norm.register_forward_hook(note)
    task.module.eval()
    batch = task.source.epoch(0)[0].to(moa.to_memory.weight.device)
    task.loss(task.module, batch, torch.Generator().manual_seed(0), 1.0, agreement=False)
    hook.remove()
    # The stream is the sum of what these write, and all that reads it, or memory, normalises first.
    written = [module for module in moa.entry.modules() if isinstance(module, Linear)]
    written += [moa.to_memory, *(linear for layer in (moa.sa, moa.ca) for linear in (layer.output, layer.mlp.down))]
    for parameter in (each for linear in written for each in linear.parameters()):
        parameter.mul_(shares[0])


@torch.no_grad()
def _refit(source: nn.Module, target: nn.Module) -> None:
    """Copy the units whose weights have the largest products of norms, as many as there is room for."""
    assert isinstance(source, MLP | BlockHead) and isinstance(target, MLP | BlockHead)
    inputs = _inputs(source)
    both = torch.cat([x.weight for x in inputs], dim=1)
    strength = both.norm(dim=1).view(2, -1).prod(dim=0) * source.down.weight.norm(dim=0)
    units = strength.topk(min(len(strength), target.intermediate_size)).indices.sort().values
    places = torch.arange(len(units), device=units.device)
    target.down.weight.zero_()
    target.down.weight[:, places] = source.down.weight[:, units]
    for half in range(2):
        rows, kept = places + half * target.intermediate_size, units + half * source.intermediate_size
        for old, new in zip(inputs, _inputs(target), strict=True):
            new.weight[rows] = old.weight[kept]
            if new.bias is not None and old.bias is not None:
                new.bias[rows] = old.bias[kept]


def _inputs(mlp: MLP | BlockHead) -> list[Linear]:
    """What leads to the units: gates, then what they let through."""
    return [mlp.gate_up] if isinstance(mlp, MLP) else [mlp.from_state, mlp.from_token, mlp.from_feature]
