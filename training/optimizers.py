"""What changes weights by their gradients."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from models.layers import Linear
from models.tiles import multiplies_bfloat16
from training.muon import StackedMuon
from training.run_config import RunConfig


def optimizers(config: RunConfig, network: nn.Module, device: torch.device) -> list[Optimizer]:
    """AdamW for all weights, or Muon for the matrices of layers and AdamW for all others.

    Muon (https://kellerjordan.github.io/posts/muon) takes of a matrix's gradient its directions and not their lengths; its steps
    are made as large as AdamW's (arXiv 2502.16982), so that one learning rate suits both.
    """
    matrices = [] if config.optimizer == "adamw" else _matrices(network)
    others = set(network.parameters()) - set(matrices)
    # In the network's order: checkpoints name weights by their number.
    rest = [parameter for parameter in network.parameters() if parameter in others]
    made: list[Optimizer] = [
        torch.optim.AdamW(
            rest,
            lr=config.lr,
            betas=(0.9, config.beta2),
            weight_decay=config.weight_decay,
            fused=device.type in ("cpu", "cuda"),
        )
    ]
    if matrices:
        fast = multiplies_bfloat16(device)
        if device.type == "cpu" and fast:
            made.append(torch.optim.Muon(matrices, config.lr, config.weight_decay, adjust_lr_fn="match_rms_adamw"))
        else:
            made.append(StackedMuon(matrices, config.lr, config.weight_decay, torch.bfloat16 if fast else torch.float32))
    return made


def _matrices(network: nn.Module) -> list[nn.Parameter]:
    """Weights that map activations to activations: neither tables of tokens, nor norms, nor biases."""
    return [
        module.weight
        for name, module in network.named_modules()
        if isinstance(module, Linear) and module.weight.requires_grad and name.rpartition(".")[2] != "lm_head"
    ]
