"""What training a drafter is, whatever its kind."""

from __future__ import annotations

from typing import Any

from models.llama import Llama
from training.batches import conversations
from training.config import TrainConfig
from training.data import Corpus
from training.progress import Meter


class DraftingTask:
    """A frozen target and conversations; the answers in them are what is drafted."""

    def __init__(self, config: TrainConfig, target: Llama, corpus: Corpus, valid: Corpus | None) -> None:
        self.config, self.target, self.key = config, target, corpus.key
        self.source, self.valid = conversations(config, corpus, valid)

    def figures(self, meter: Meter) -> dict[str, Any]:
        """Losses, accuracy by draft depth and the acceptance length that they imply."""
        return {**meter.losses(), "acceptance_length": meter.acceptance_length, "accuracy": meter.accuracy}

    def describe(self, figures: dict[str, Any]) -> str:
        """As in Task."""
        kind = self.config.token_loss
        accuracy = " ".join(f"{share:.3f}" for share in figures["accuracy"][:8])
        return (
            f"loss {figures['loss']:.4f}, {kind} {figures[kind]:.4f}, τ {figures['acceptance_length']:.2f}, "
            f"accuracy by depth {accuracy}"
        )
