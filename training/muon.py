"""PyTorch's Muon where that is slow: weights of one shape go through it together, in a type that the device multiplies.

PyTorch's goes from matrix to matrix, some thirty small operations each. A target of 18 layers has 72, whose launches take an H100's
host longer than the GPU takes for the batch. And it computes in bfloat16, which a CPU that does not multiply it does some twenty
times as slowly as float32.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class StackedMuon(torch.optim.Muon):
    """The same updates, and the same state, but for rounding, which is that of ``precision``."""

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, weight_decay: float, precision: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__(parameters, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self._precision = precision

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """As in Optimizer."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            alike: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike[parameter.shape].append(parameter)
            for shape, parameters in alike.items():
                directions = _directions(self._updates(parameters, group).to(self._precision), group)
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                rate = 0.2 * math.sqrt(max(shape)) * group["lr"]  # match_rms_adamw
                torch._foreach_add_(parameters, list(directions.to(parameters[0].dtype)), alpha=-rate)
        return loss

    def _updates(self, parameters: list[Tensor], group: dict[str, Any]) -> Tensor:
        """Nesterov's momentum of weights of one shape [K, out, in]."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        buffers = [self._buffer(parameter) for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        return torch.stack(torch._foreach_lerp(gradients, buffers, group["momentum"]) if group["nesterov"] else buffers)

    def _buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def _directions(updates: Tensor, group: dict[str, Any]) -> Tensor:
    """The nearest orthogonal matrices, roughly, by Newton–Schulz: [K, out, in] -> the same."""
    a, b, c = group["ns_coefficients"]
    tall = updates.shape[1] > updates.shape[2]
    x = updates.mT if tall else updates
    x = x / x.flatten(1).norm(dim=1).clamp(min=group["eps"]).view(-1, 1, 1)
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
