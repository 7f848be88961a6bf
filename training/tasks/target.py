"""Training a target: a plain language model on chats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.attention import masked_attention
from models.layers import DecoderLayer, Rope
from models.llama import Llama
from models.saving import save_target
from training.batches import Batch, conversations
from training.config import PretrainConfig
from training.corpus import Corpus
from training.losses import Loss, Mean
from training.progress import Meter
from training.token_loss import token_loss


class TargetForward(nn.Module):
    """Whole rows of text without a cache; ``compiled`` fuses what stands between attentions with torch.compile."""

    def __init__(self, target: Llama, *, compiled: bool) -> None:
        super().__init__()
        self.target = target
        self._project = torch.compile(_project, dynamic=True) if compiled else _project
        self._finish = torch.compile(_finish, dynamic=True) if compiled else _finish

    def forward(self, token_ids: Tensor) -> Tensor:
        """Token ids [B, S] -> what enters the LM head [B·S, E]."""
        target, config, (batch, length) = self.target, self.target.config, token_ids.shape
        target.rotary.reserve(length, target.embedding.weight)
        rope = target.rotary(torch.arange(length, device=token_ids.device).repeat(batch))
        attend = masked_attention(batch, config.num_heads, config.num_kv_heads, None, causal=True)
        hidden = target.embed(token_ids.flatten())
        for layer in target.borrowed(0):
            hidden = self._finish(layer, hidden, attend(*self._project(layer, hidden, rope)))
        out: Tensor = target.norm(hidden)
        return out


def _project(layer: DecoderLayer, hidden: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    return layer.project(layer.input_norm(hidden), rope)


def _finish(layer: DecoderLayer, hidden: Tensor, attended: Tensor) -> Tensor:
    return layer.finish(hidden, attended)


class TargetTask:
    """Predict every next token of conversations; those that assistants did not write count for ``prompt_weight``."""

    def __init__(self, config: PretrainConfig, target: Llama, base: Path, corpus: Corpus, valid: Corpus | None) -> None:
        self.config, self.network, self.base, self.key = config, target, base, corpus.key
        self.module: nn.Module = TargetForward(target, compiled=config.compile)
        self.depths = 1
        self.source, self.valid = conversations(config, corpus, valid)

    def loss(
        self, module: nn.Module, batch: Batch, generator: torch.Generator, progress: float, *, agreement: bool
    ) -> tuple[Loss, Tensor]:
        """As in Task; nothing is drawn, and every row has depth 0."""
        # A conversation ends with an answer; what follows is padding.
        rows = batch.response[:, 1:].flip(1).cumsum(1).flip(1).flatten().nonzero().squeeze(1)
        labels, answers = (x[:, 1:].flatten().index_select(0, rows) for x in (batch.token_ids, batch.response))
        weights = torch.where(answers, 1.0, self.config.prompt_weight)
        with torch.autocast(batch.token_ids.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
            hidden = module(batch.token_ids).unflatten(0, batch.token_ids.shape)[:, :-1].flatten(0, 1).index_select(0, rows)
            head = self.network.lm_head.weight
            result = token_loss(head, hidden, lambda chunk: labels[chunk], weights, agreement=agreement)
        each = {"loss": weights, "text": torch.ones_like(weights), "answers": answers}
        parts = {name: Mean((result.losses * counted).sum(), float(counted.sum())) for name, counted in each.items()}
        return Loss(result.mean, parts, result.correct if agreement else None), torch.zeros_like(labels)

    def figures(self, meter: Meter) -> dict[str, Any]:
        """Cross-entropies in nats a token, and how often the likeliest token was right."""
        return {**meter.losses(), "accuracy": meter.accuracy}

    def describe(self, figures: dict[str, Any]) -> str:
        """As in Task."""
        return f"loss {figures['text']:.4f}, of answers {figures['answers']:.4f}, next token right {figures['accuracy'][0]:.3f}"

    def save(self, folder: Path) -> None:
        """As a Hugging Face checkpoint in bfloat16, with the tokenizer and the generation settings that it began with."""
        save_target(self.network, folder, self.base, dtype=torch.bfloat16)
