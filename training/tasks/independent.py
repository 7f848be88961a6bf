"""Training a small language model to draft for a frozen target."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from models.llama import Llama
from models.saving import save_target
from training import masks
from training.batches import Batch
from training.config import TrainConfig
from training.corpus import Corpus
from training.losses import Loss, Mean
from training.needs import Needs
from training.tasks.drafting import DraftingTask
from training.tasks.target import TargetForward
from training.token_loss import distribution, token_loss


class IndependentTask(DraftingTask):
    """The target's distribution at every position of an answer, from the text alone."""

    def __init__(
        self, config: TrainConfig, target: Llama, drafter: Llama, base: Path, corpus: Corpus, valid: Corpus | None
    ) -> None:
        super().__init__(config, target, Needs(keys_values=False), corpus, valid)
        self.network, self.base = drafter, base
        self.module: nn.Module = TargetForward(drafter, compiled=False)
        self.depths = config.max_interval

    def loss(
        self, module: nn.Module, batch: Batch, generator: torch.Generator, progress: float, *, agreement: bool
    ) -> tuple[Loss, Tensor]:
        """As in Task. What it proposes does not depend on what is verified; intervals are drawn to say how deep drafts would go."""
        config, count, head = self.config, len(batch.token_ids), self.target.lm_head.weight
        intervals = masks.draw_intervals(count, config.min_interval, config.max_interval, generator).to(batch.response.device)
        proposing = masks.proposing_positions(batch.response)
        boundaries = masks.verification_boundaries(proposing, intervals)
        # A boundary's own proposal is a draft like any other here, but has no depth.
        taught = proposing & ~boundaries
        rows = taught.flatten().nonzero().squeeze(1)
        depths = masks.draft_depths(boundaries).flatten().index_select(0, rows)
        truth = self.truth(batch)
        hidden = truth.hidden.flatten(0, 1).index_select(0, rows)
        with torch.autocast(batch.token_ids.device.type, torch.bfloat16, enabled=config.dtype == "bfloat16"):
            ours = module(batch.token_ids).index_select(0, rows)
            wanted = distribution(head, hidden, config.target_temperature)
            result = token_loss(self.network.lm_head.weight, ours, wanted, kind=config.token_loss, agreement=agreement)
        means = {name: Mean(result.mean.detach() * len(rows), len(rows)) for name in ("loss", config.token_loss)}
        return Loss(result.mean, means, result.correct if agreement else None), depths

    def save(self, folder: Path) -> None:
        """As a Hugging Face checkpoint in bfloat16, with the target's tokenizer."""
        save_target(self.network, folder, self.base, dtype=torch.bfloat16)
