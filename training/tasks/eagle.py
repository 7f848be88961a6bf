"""Training EAGLE-2 and EAGLE-3 drafters for a frozen target."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from models.eagle import Eagle
from models.layers import queries
from models.llama import Llama
from models.loader import resolve_target
from models.saving import save_eagle
from training import masks
from training.batches import Batch
from training.config import TrainConfig
from training.corpus import Corpus
from training.losses import Loss, Mean, smooth_l1
from training.needs import Needs
from training.rows import Padded
from training.tasks.drafting import DraftingTask
from training.token_loss import distribution, token_loss

DECAY = 0.8
"""What a draft step counts beside the one before it (EAGLE-3's code)."""


class EagleForward(nn.Module):
    """What the drafter says at wanted positions, in each draft step."""

    def __init__(self, eagle: Eagle) -> None:
        super().__init__()
        self.eagle = eagle

    def forward(
        self, target: Llama, token_ids: Tensor, tapped: Tensor, wanted: Tensor, steps: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """``token_ids`` and ``wanted`` [B, S], ``tapped`` [B, S, taps·E] -> features of each step, and what enters the head [R, E].

        In step 0 a position reads the true feature of the one before it, in step s that of step s − 1: its own guess, s deep.
        What it attends to is the same: step 0's keys and values up to s positions back, and from there on those of each step.
        """
        eagle = self.eagle
        batch, length = token_ids.shape
        padded = Padded(wanted)
        rows, before = padded.rows, (padded.rows - 1).clamp(min=0)
        embeddings = target.embed(token_ids.flatten())
        eagle.rotary.reserve(length, embeddings)
        rope = eagle.rotary(torch.arange(length, device=token_ids.device).repeat(batch))
        own_rope = (rope[0].index_select(0, rows), rope[1].index_select(0, rows))
        known = eagle.known(tapped.flatten(0, 1)).view(batch, length, -1)
        shifted = torch.cat((torch.zeros_like(known[:, :1]), known[:, :-1]), dim=1).flatten(0, 1)
        inputs = eagle.inputs(embeddings, shifted)
        keys_values = [eagle.keys_values(inputs, rope).unflatten(0, (batch, length))]
        here = padded.positions.unsqueeze(2)
        text = torch.arange(length, device=token_ids.device)
        own = embeddings.index_select(0, rows)
        features: list[Tensor] = []
        for step in range(steps):
            if step:
                guesses = torch.zeros_like(embeddings).index_copy(0, rows, features[-1].to(embeddings.dtype))
                inputs = eagle.inputs(own, guesses.index_select(0, before))
                keys_values.append(padded.fill(eagle.keys_values(inputs, own_rope)))
            else:
                inputs = inputs.index_select(0, rows)
            seen = [text <= here - step]
            seen += [padded.positions.unsqueeze(1) == here - step + back for back in range(1, step + 1)]
            attended = padded.attend(queries(eagle.layer, inputs, own_rope), torch.cat(keys_values, dim=1), torch.cat(seen, dim=2))
            features.append(eagle.layer.finish(inputs, attended))
        return features, [eagle.entering(x) for x in features]


class EagleTask(DraftingTask):
    """EAGLE-2: teacher forcing with noise on the features, both losses. EAGLE-3: tokens alone, on its own outputs."""

    def __init__(self, config: TrainConfig, target: Llama, drafter: Eagle, corpus: Corpus, valid: Corpus | None) -> None:
        super().__init__(config, target, Needs(keys_values=False, taps=drafter.config.taps), corpus, valid)
        self.network = drafter
        self.module: nn.Module = EagleForward(drafter)
        self.depths = self.steps = config.unroll if drafter.config.generation == 3 else 1

    def loss(
        self, module: nn.Module, batch: Batch, generator: torch.Generator, progress: float, *, agreement: bool
    ) -> tuple[Loss, Tensor]:
        """As in Task; EAGLE-2's noise is drawn, in training."""
        config, eagle, head = self.config, self.network, self.target.lm_head.weight
        third = eagle.config.generation == 3
        wanted = masks.proposing_positions(batch.response)
        truth = self.truth(batch)
        tapped = truth.tapped
        assert tapped is not None
        if module.training and not third and config.feature_noise:
            noise = torch.rand(tapped.shape, generator=generator) * 2 - 1
            tapped = tapped + noise.to(tapped) * config.feature_noise
        rows = wanted.flatten().nonzero().squeeze(1)
        # A guess s deep needs s positions of the same answer before it.
        room = masks.draft_depths(~wanted).flatten().index_select(0, rows)
        hidden = truth.hidden.flatten(0, 1).index_select(0, rows)
        with torch.autocast(batch.token_ids.device.type, torch.bfloat16, enabled=config.dtype == "bfloat16"):
            features, entering = module(self.target, batch.token_ids, tapped, wanted, self.steps)
            kept = [(room >= step).nonzero().squeeze(1) for step in range(self.steps)]
            entering = [eagle.entering(x.index_select(0, at)) for x, at in zip(features, kept, strict=True)]
            results = [
                token_loss(
                    head,
                    x,
                    distribution(head, hidden.index_select(0, at), config.target_temperature),
                    kind=config.token_loss,
                    agreement=agreement,
                )
                for x, at in zip(entering, kept, strict=True)
            ]
            shares = [DECAY**step for step in range(self.steps)]
            token = torch.stack([share * each.mean for share, each in zip(shares, results, strict=True)]).sum() / sum(shares)
            feature = smooth_l1(features[0], hidden)
        total = token if third else config.kl_weight * token + config.feature_weight * feature
        count = len(rows)
        parts: dict[str, Tensor] = {"loss": total, config.token_loss: token} | ({} if third else {"feature": feature})
        means = {name: Mean(part.detach() * count, count) for name, part in parts.items()}
        depths = torch.cat([torch.full_like(at, step) for step, at in enumerate(kept)])
        # In the order of a draft: by its root, then by depth.
        order = ((torch.cat(kept) - depths) * self.steps + depths).argsort()
        correct = torch.cat([each.correct for each in results])[order] if agreement else None
        return Loss(total, means, correct), depths[order]

    def save(self, folder: Path) -> None:
        """As bfloat16."""
        save_eagle(self.network, folder, made_for=resolve_target(self.config.target), dtype=torch.bfloat16)
