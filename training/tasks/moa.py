"""Training a Mixture-of-Attentions drafter for a frozen target."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from models.llama import Llama
from models.loader import resolve_target
from models.moa import MoA
from models.saving import save_drafter
from training import masks
from training.batches import Batch
from training.config import TrainConfig
from training.corpus import Corpus
from training.forward import DraftForward
from training.losses import Loss, draft_loss
from training.needs import needs_of
from training.tasks.drafting import DraftingTask


class MoATask(DraftingTask):
    """Every draft depth at once: verification boundaries are drawn, and what lies between them is drafted.

    A draw teaches each position at one depth; several draws share one pass over the target and the memory of it.
    """

    def __init__(self, config: TrainConfig, target: Llama, drafter: MoA, corpus: Corpus, valid: Corpus | None) -> None:
        needs = needs_of("moa", drafter.config.target_layer_inference, target.config)
        super().__init__(config, target, needs, corpus, valid)
        self.network = drafter
        self.module: nn.Module = DraftForward(drafter, compiled=config.compile)
        self.depths = config.max_interval

    def loss(
        self, module: nn.Module, batch: Batch, generator: torch.Generator, progress: float, *, agreement: bool
    ) -> tuple[Loss, Tensor]:
        """As in Task; the staircase fades with ``progress``."""
        config, device = self.config, batch.response.device
        draws = config.draws if module.training else 1
        count = draws * len(batch.token_ids)
        # Drawn on the CPU, so that a seed means the same on every device.
        intervals = masks.draw_intervals(count, config.min_interval, config.max_interval, generator)
        # One draw counts from an answer's start, as in the paper; alone it teaches an answer's first tokens at one depth each.
        phases = masks.draw_phases(intervals, generator) if draws > 1 else torch.zeros_like(intervals)
        phases[: len(batch.token_ids)] = 0
        staircase = masks.staircase_probability(progress, config.staircase_until)
        stairs = masks.draw_staircase(count, staircase, generator).to(device)
        proposing = masks.proposing_positions(batch.response).repeat(draws, 1)
        boundaries = masks.verification_boundaries(proposing, intervals.to(device), phases.to(device))
        taught = proposing & ~boundaries
        rows = taught.flatten().nonzero().squeeze(1)
        depths = masks.draft_depths(boundaries).flatten().index_select(0, rows)
        truth = self.truth(batch)
        with torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bfloat16"):
            draft = module(
                self.target,
                batch.token_ids,
                truth,
                masks.self_attention_mask(boundaries, stairs),
                masks.cross_attention_mask(boundaries, newest_only=not self.network.config.attends_to_all_memory),
                boundaries,
                taught,
            )
            loss = draft_loss(
                self.target.lm_head.weight,
                truth,
                draft,
                rows % batch.token_ids.numel(),
                kl_weight=config.kl_weight,
                feature_weight=config.feature_weight,
                kind=config.token_loss,
                temperature=config.target_temperature,
                agreement=agreement,
            )
        return loss, depths

    def save(self, folder: Path) -> None:
        """In the published layout, as bfloat16."""
        save_drafter(self.network, folder, made_for=resolve_target(self.config.target), dtype=torch.bfloat16)
