"""Cross-entropy over a large vocabulary: logits are never all held at once, and gradients are found on the way forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_ROWS = 512
"""Rows whose logits are held at a time: few enough for a large vocabulary's to fit, enough to keep the hardware busy."""

Wanted = Callable[[slice], Tensor]
"""What is wanted of some rows: labels [r], or distributions [r, V]."""


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """``mean`` is a scalar that carries gradients; the rows' own ``losses`` [R] and whether they were ``correct`` [R] do not.

    ``correct`` (the likeliest token is the wanted one) is empty unless asked for.
    """

    mean: Tensor
    losses: Tensor
    correct: Tensor


def cross_entropy(
    weight: Tensor, features: Tensor, wanted: Wanted, weights: Tensor | None = None, *, agreement: bool = False
) -> CrossEntropy:
    """Cross-entropy of softmax(``features`` [R, E] @ ``weight`` [V, E].T), the mean under ``weights`` [R] (equal ones if None).

    Gradients reach ``features``, and ``weight`` where that is trained; a mean of no rows is 0.
    """
    weights = torch.ones(len(features), device=features.device) if weights is None else weights
    return CrossEntropy(*_CrossEntropy.apply(features, weight, wanted, weights, agreement))  # type: ignore[no-untyped-call]


def distribution(weight: Tensor, hidden: Tensor, temperature: float = 1.0) -> Wanted:
    """softmax(``hidden`` [R, E] @ ``weight`` [V, E].T / temperature)."""
    return lambda rows: torch.softmax(F.linear(hidden[rows], weight).float() / temperature, dim=-1)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, wanted: Wanted, weights: Tensor, agreement: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        learns, trains_weight = ctx.needs_input_grad[:2]
        shares = weights / weights.sum().clamp(min=1e-9)
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if trains_weight else None
        to_features, losses, correct = [], [], []
        # Once, and not for every chunk, in the type that autocast would choose.
        device = features.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else features.dtype
        head = weight.to(dtype)
        for start in range(0, len(features), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            logits, target = F.linear(features[rows].to(dtype), head), wanted(rows)
            log_probabilities = torch.log_softmax(logits.float(), dim=-1)
            labels = target.dim() == 1
            if agreement:
                correct.append(logits.argmax(-1) == (target if labels else target.argmax(-1)))
            if labels:
                losses.append(-log_probabilities.gather(1, target.unsqueeze(1)).squeeze(1))
            else:
                losses.append(-torch.linalg.vecdot(target, log_probabilities))
            if not learns:
                continue
            # The gradient of a row's logits: what it says less what is wanted.
            difference = log_probabilities.exp_()
            if labels:
                difference.scatter_add_(1, target.unsqueeze(1), difference.new_full((len(target), 1), -1.0))
            else:
                difference.sub_(target)
            difference = difference.mul_(shares[rows].unsqueeze(1)).to(logits.dtype)
            to_features.append((difference @ head).to(features.dtype))
            if to_weight is not None:
                to_weight += difference.T @ features[rows].to(dtype)
        ctx.save_for_backward(
            torch.cat(to_features) if to_features else torch.zeros_like(features),
            None if to_weight is None else to_weight.to(weight.dtype),
        )
        each = torch.cat(losses) if losses else torch.zeros(0, device=features.device)
        agreed = torch.cat(correct) if correct else torch.zeros(0, dtype=torch.bool, device=features.device)
        ctx.mark_non_differentiable(each, agreed)
        return torch.dot(each, shares.to(each.dtype)), each, agreed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        to_features, to_weight = ctx.saved_tensors
        return gradient.to(to_features.dtype) * to_features, None if to_weight is None else gradient * to_weight, None, None, None
