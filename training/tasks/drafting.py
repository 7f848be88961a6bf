"""What training a drafter is, whatever its kind."""

from __future__ import annotations

from typing import Any

from models.llama import Llama
from training.batches import Batch, Conversations, held_out
from training.config import TrainConfig
from training.data import Corpus
from training.progress import Meter


class DraftingTask:
    """A frozen target and conversations; the answers in them are what is drafted."""

    def __init__(self, config: TrainConfig, target: Llama, corpus: Corpus, valid: Corpus | None) -> None:
        self.config, self.target, self.key = config, target, corpus.key
        self.source = Conversations(corpus, config.max_length, config.batch_tokens, config.seed, name=config.data)
        self.valid: list[Batch] = []
        if valid is not None:
            source = Conversations(valid, config.max_length, config.batch_tokens, 0, name=str(config.valid))
            self.valid = held_out(source, config.valid_tokens)

    def figures(self, meter: Meter) -> dict[str, Any]:
        """Losses, accuracy by draft depth and the acceptance length that they imply."""
        return {**meter.losses(), "acceptance_length": meter.acceptance_length, "accuracy": meter.accuracy}

    def describe(self, figures: dict[str, Any]) -> str:
        """As in Task."""
        accuracy = " ".join(f"{share:.3f}" for share in figures["accuracy"][:8])
        return (
            f"loss {figures['loss']:.4f}, kl {figures['kl']:.4f}, τ {figures['acceptance_length']:.2f}, "
            f"accuracy by depth {accuracy}"
        )
