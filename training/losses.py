"""What is minimised, and what is told of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from models.llama import TargetActivations
from training.choices import TokenLossKind
from training.forward import DraftRows
from training.token_loss import distribution, token_loss


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over rows, in the two numbers that batches are pooled by."""

    total: Tensor
    count: float

    @property
    def value(self) -> Tensor:
        """0 when there are no rows."""
        return self.total / max(self.count, 1e-9)


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss of a batch: ``loss`` carries gradients; the named ``parts`` are what is reported, and do not.

    ``correct`` [R] tells for each row whether its likeliest token is the wanted one; None unless asked for.
    """

    loss: Tensor
    parts: dict[str, Mean]
    correct: Tensor | None

    @property
    def count(self) -> float:
        """The rows, or the sum of their weights, that ``loss`` is the mean over: what it counts beside other batches' losses."""
        return self.parts["loss"].count


def draft_loss(
    head: Tensor,
    truth: TargetActivations,
    draft: DraftRows,
    rows: Tensor,
    *,
    kl_weight: float,
    feature_weight: float,
    kind: TokenLossKind = "kl",
    temperature: float = 1.0,
    agreement: bool = False,
) -> Loss:
    """kl_weight·KL(target ‖ drafter) + feature_weight·smooth-L1, means over ``rows`` (arXiv 2410.03804).

    The target's distribution is that at ``temperature``, the drafter's is as it is. KL is taken as cross-entropy against the
    target's softmax, and may be another ``kind`` of token loss, under whose name it is told. For a drafter with borrowed layers
    half of the feature term is the loss on the predicted input of the first of them. ``head`` [V, E] are the LM head's weights;
    ``rows`` [R] are the positions of ``draft`` in the flattened ``truth``, [B·S].
    """
    features, hidden = draft.feature, _rows(truth.hidden, rows)
    token = token_loss(head, features, distribution(head, hidden, temperature), kind=kind, agreement=agreement)
    parts: dict[str, Tensor] = {kind: token.mean, "feature": smooth_l1(features, hidden)}
    smooth = parts["feature"]
    if draft.predicted_input is not None:
        assert truth.layer_input is not None
        parts["predicted"] = smooth_l1(draft.predicted_input, _rows(truth.layer_input, rows))
        smooth = (smooth + parts["predicted"]) / 2
    parts["loss"] = kl_weight * token.mean + feature_weight * smooth
    count = len(features)
    means = {name: Mean(part.detach() * count, count) for name, part in parts.items()}
    return Loss(parts["loss"], means, token.correct if agreement else None)


def smooth_l1(ours: Tensor, theirs: Tensor) -> Tensor:
    """Mean over all elements, 0 when there are none."""
    return F.smooth_l1_loss(ours.float(), theirs.float(), reduction="sum") / max(ours.numel(), 1)


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.flatten(0, 1).index_select(0, rows)
