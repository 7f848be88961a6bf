"""How far what we say of the next token is from what is wanted, over large vocabularies.

Logits are never all held at once, and gradients are found on the way forward.

With p wanted and q ours, both of a row, α = Σ min(p, q) is the share of its drafts that speculative sampling accepts
(arXiv 2211.17192).

- ``kl``: cross-entropy −Σ p log q, which is KL(p ‖ q) but for a constant.
- ``tv``: total variation, 1 − α. What is wanted, but its gradient vanishes where q is far from p.
- ``lk``: −log α (LK losses, arXiv 2602.23881): the gradient of ``tv`` divided by α.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.choices import TokenLossKind

CHUNK_ROWS = 512
"""Rows whose logits are held at a time on a CPU."""

_CHUNK_LOGITS = 1 << 25
"""Logits that are held at a time on a GPU, which waits between small chunks; of a vocabulary of 128k the same rows as on a CPU."""


def _chunk_rows(weight: Tensor) -> int:
    """Rows whose logits by an LM head [V, E] are held at a time."""
    return CHUNK_ROWS if weight.device.type == "cpu" else max(CHUNK_ROWS, _CHUNK_LOGITS // len(weight))


Wanted = Callable[[slice], Tensor]
"""What is wanted of some rows: labels [r], or distributions [r, V]."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """``mean`` is a scalar that carries gradients; the rows' own ``losses`` [R] and whether they were ``correct`` [R] do not.

    ``correct`` (the likeliest token is the wanted one) is empty unless asked for.
    """

    mean: Tensor
    losses: Tensor
    correct: Tensor


def token_loss(
    weight: Tensor,
    features: Tensor,
    wanted: Wanted,
    weights: Tensor | None = None,
    *,
    kind: TokenLossKind = "kl",
    agreement: bool = False,
) -> TokenLoss:
    """Loss of softmax(``features`` [R, E] @ ``weight`` [V, E].T), the mean under ``weights`` [R] (equal ones if None).

    Gradients reach ``features``, and ``weight`` where that is trained; a mean of no rows is 0. Labels go with ``kl`` only.
    """
    weights = torch.ones(len(features), device=features.device) if weights is None else weights
    apply: Callable[..., tuple[Tensor, Tensor, Tensor]] = _TokenLoss.apply  # torch does not say what it returns
    return TokenLoss(*apply(features, weight, wanted, weights, kind, agreement))


def distribution(weight: Tensor, hidden: Tensor, temperature: float = 1.0) -> Wanted:
    """softmax(``hidden`` [R, E] @ ``weight`` [V, E].T / temperature)."""
    return lambda rows: torch.softmax(F.linear(hidden[rows], weight).float() / temperature, dim=-1)


class _TokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, wanted: Wanted, weights: Tensor, kind: TokenLossKind, agreement: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        learns, trains_weight = ctx.needs_input_grad[:2]
        shares = weights / weights.sum().clamp(min=1e-9)
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if trains_weight else None
        to_features, losses, correct = [], [], []
        # Once, and not for every chunk, in the type that autocast would choose.
        device = features.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else features.dtype
        head, size = weight.to(dtype), _chunk_rows(weight)
        for start in range(0, len(features), size):
            rows = slice(start, start + size)
            logits, target = F.linear(features[rows].to(dtype), head), wanted(rows)
            log_probabilities = torch.log_softmax(logits.float(), dim=-1)
            if agreement:
                correct.append(logits.argmax(-1) == (target if target.dim() == 1 else target.argmax(-1)))
            if kind == "kl":
                part, slope = _cross_entropy(log_probabilities, target)
            else:
                part, slope = _overlap(log_probabilities, target, logarithmic=kind == "lk")
            losses.append(part)
            if not learns:
                continue
            slope = slope.mul_(shares[rows].unsqueeze(1)).to(logits.dtype)
            to_features.append((slope @ head).to(features.dtype))
            if to_weight is not None:
                to_weight += slope.T @ features[rows].to(dtype)
        ctx.save_for_backward(
            torch.cat(to_features) if to_features else torch.zeros_like(features),
            None if to_weight is None else to_weight.to(weight.dtype),
        )
        each = torch.cat(losses) if losses else torch.zeros(0, device=features.device)
        agreed = torch.cat(correct) if correct else torch.zeros(0, dtype=torch.bool, device=features.device)
        ctx.mark_non_differentiable(each, agreed)
        return torch.dot(each, shares.to(each.dtype)), each, agreed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        to_features, to_weight = ctx.saved_tensors
        to_weight = None if to_weight is None else gradient * to_weight
        return gradient.to(to_features.dtype) * to_features, to_weight, None, None, None, None


def _cross_entropy(log_probabilities: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Losses [r], and their gradients by the logits [r, V] (written over the input): what a row says less what is wanted."""
    if target.dim() == 1:
        losses = -log_probabilities.gather(1, target.unsqueeze(1)).squeeze(1)
        slope = log_probabilities.exp_()
        return losses, slope.scatter_add_(1, target.unsqueeze(1), slope.new_full((len(target), 1), -1.0))
    losses = -torch.linalg.vecdot(target, log_probabilities)
    return losses, log_probabilities.exp_().sub_(target)


def _overlap(log_probabilities: Tensor, target: Tensor, *, logarithmic: bool) -> tuple[Tensor, Tensor]:
    """1 − α or −log α [r], and the gradients by the logits [r, V] (written over the input)."""
    ours = log_probabilities.exp_()
    overlap = torch.minimum(ours, target).sum(dim=-1)
    wanting = ours * (ours < target)  # where more probability would be accepted
    slope = ours.mul_(wanting.sum(dim=-1, keepdim=True)).sub_(wanting)
    if not logarithmic:
        return 1 - overlap, slope
    overlap = overlap.clamp(min=1e-9)
    return -overlap.log(), slope.div_(overlap.unsqueeze(1))
