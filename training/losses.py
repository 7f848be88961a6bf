"""What the drafter is trained to minimise, on the rows that count and without ever holding all logits at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.llama import TargetActivations
from training.forward import DraftRows

LMHead = Callable[[Tensor], Tensor]
"""[n, E] -> [n, V]."""

CHUNK_ROWS = 512
"""Rows whose logits are held at a time: few enough for a large vocabulary's to fit, enough to keep the hardware busy."""


@dataclass(frozen=True, slots=True)
class DraftLoss:
    """Loss of a batch and its parts, scalars: ``loss`` carries gradients, the others do not.

    ``correct`` [R] tells for each row whether the drafter's best token is the target's; None unless asked for.
    """

    loss: Tensor
    kl: Tensor
    feature: Tensor
    predicted: Tensor | None
    correct: Tensor | None


def draft_loss(
    head: LMHead,
    truth: TargetActivations,
    draft: DraftRows,
    rows: Tensor,
    *,
    kl_weight: float,
    feature_weight: float,
    temperature: float = 1.0,
    agreement: bool = False,
) -> DraftLoss:
    """kl_weight·KL(target ‖ drafter) + feature_weight·smooth-L1, means over ``rows`` (arXiv 2410.03804).

    The target's distribution is that at ``temperature``, the drafter's is as it is. KL is taken as cross-entropy against the
    target's softmax. For a drafter with borrowed layers half of the feature term is the loss on the predicted input of the first
    of them. ``rows`` [R] are the positions of ``draft`` in the flattened [B·S].
    """
    features, hidden = draft.feature, _rows(truth.hidden, rows)
    kl, correct = soft_cross_entropy(head, features, hidden, temperature=temperature, agreement=agreement)
    feature = _smooth_l1(features, hidden)
    predicted: Tensor | None = None
    smooth = feature
    if draft.predicted_input is not None:
        if truth.layer_input is None:
            raise ValueError("a drafter with borrowed layers needs activations encoded with layer_input")
        predicted = _smooth_l1(draft.predicted_input, _rows(truth.layer_input, rows))
        smooth = (feature + predicted) / 2
    total = kl_weight * kl + feature_weight * smooth
    return DraftLoss(
        total, kl.detach(), feature.detach(), None if predicted is None else predicted.detach(), correct if agreement else None
    )


def soft_cross_entropy(
    head: LMHead, features: Tensor, hidden: Tensor, *, temperature: float = 1.0, agreement: bool = False
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of ``head(features)`` against softmax(``head(hidden)`` / temperature), and where both prefer the same.

    ``features`` and ``hidden`` [R, E] -> scalar, boolean [R] (empty unless ``agreement``). ``head`` is frozen: gradients reach
    ``features`` only.
    """
    loss, correct = _SoftCrossEntropy.apply(features, hidden, head, temperature, agreement)  # type: ignore[no-untyped-call]
    return loss, correct


class _SoftCrossEntropy(torch.autograd.Function):
    """Gradients are found chunk by chunk in the forward pass, so that no chunk's logits outlive it."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, hidden: Tensor, head: LMHead, temperature: float, agreement: bool
    ) -> tuple[Tensor, Tensor]:
        learns = ctx.needs_input_grad[0]
        total = torch.zeros((), dtype=torch.float32, device=features.device)
        gradients: list[Tensor] = []
        correct: list[Tensor] = []
        for part, truth in zip(features.detach().split(CHUNK_ROWS), hidden.split(CHUNK_ROWS), strict=True):
            with torch.set_grad_enabled(learns):
                ours = head(part.requires_grad_(learns))
            theirs = head(truth)
            if agreement:
                correct.append(ours.detach().argmax(-1) == theirs.argmax(-1))
            target = torch.softmax(theirs.float() / temperature, dim=-1)
            log_probabilities = torch.log_softmax(ours.detach().float(), dim=-1)
            total -= torch.dot(target.flatten(), log_probabilities.flatten())
            if learns:
                difference = log_probabilities.exp_().sub_(target).to(ours.dtype)
                gradients.append(torch.autograd.grad(ours, part, difference)[0])
        agreed = torch.cat(correct) if correct else torch.zeros(0, dtype=torch.bool, device=features.device)
        ctx.rows = max(len(features), 1)
        ctx.save_for_backward(torch.cat(gradients) if gradients else None)
        ctx.mark_non_differentiable(agreed)
        return total / ctx.rows, agreed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (saved,) = ctx.saved_tensors
        return (None if saved is None else saved * (gradient / ctx.rows).to(saved.dtype)), None, None, None, None


def _smooth_l1(ours: Tensor, theirs: Tensor) -> Tensor:
    """Mean over all elements, 0 when there are none."""
    return F.smooth_l1_loss(ours.float(), theirs.float(), reduction="sum") / max(ours.numel(), 1)


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.flatten(0, 1).index_select(0, rows)
