"""What training a drafter is, whatever its kind."""

from __future__ import annotations

from typing import Any

from models.llama import Llama, TargetActivations
from training.batches import Batch, conversations
from training.config import TrainConfig
from training.corpus import Corpus
from training.needs import Needs
from training.progress import Meter


class DraftingTask:
    """A frozen target and conversations; the answers in them are what is drafted.

    Of a target whose activations were kept only the ends are there, and the layers that the drafter borrows.
    """

    def __init__(self, config: TrainConfig, target: Llama, needs: Needs, corpus: Corpus, valid: Corpus | None) -> None:
        self.config, self.target, self.needs, self.key = config, target, needs, corpus.key
        for text in (corpus, valid):
            if text is not None and text.activations is not None:
                text.activations.check(needs)
        self.source, self.valid = conversations(config, corpus, valid)

    def truth(self, batch: Batch) -> TargetActivations:
        """What the target makes of a batch: read with it, or computed now."""
        if batch.activations is not None:
            return batch.activations
        return self.target.encode(batch.token_ids, layer_input=self.needs.layer_input, taps=self.needs.taps)

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
