"""What a drafter is validated on, and what is said of it."""

from __future__ import annotations

from typing import Any, cast

from training.batches import Batch, collate, plan_batches
from training.config import TrainConfig
from training.data import Corpus
from training.errors import DataError

VALIDATION = 1 << 20
"""Stands for the epoch in the seeds of validation batches, so that training never draws the same."""


def validation_batches(config: TrainConfig, valid: Corpus) -> list[Batch]:
    """The same batches every time, spread over the held-out file, about ``valid_tokens`` of them; raises DataError without any."""
    indices = valid.usable(config.max_length)
    if not len(indices):
        raise DataError(f"{config.valid}: no response token within --max-length {config.max_length}")
    plan = plan_batches(valid.lengths(config.max_length)[indices], config.batch_tokens, seed=0, epoch=VALIDATION)
    batches: list[Batch] = []
    tokens = 0
    for chosen in plan:
        if tokens >= config.valid_tokens:
            break
        batches.append(collate(valid, indices[chosen], config.max_length))
        tokens += batches[-1].token_ids.numel()
    return batches


def describe(step: int, figures: dict[str, Any]) -> str:
    """A validation as one line."""
    accuracy = " ".join(f"{share:.3f}" for share in cast("list[float]", figures["accuracy"])[:8])
    return (
        f"step {step}: validation loss {figures['loss']:.4f}, kl {figures['kl']:.4f}, τ {figures['acceptance_length']:.2f}, "
        f"accuracy by depth {accuracy}"
    )
