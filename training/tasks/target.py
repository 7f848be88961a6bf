"""Training a target: a plain language model on chats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.attention import masked_attention
from models.llama import Llama
from models.saving import save_target
from training.batches import Batch, Packed, held_out
from training.config import PretrainConfig
from training.cross_entropy import cross_entropy
from training.data import Corpus
from training.losses import Loss, Mean
from training.progress import Meter


class TargetForward(nn.Module):
    """Whole rows of text without a cache."""

    def __init__(self, target: Llama, *, compiled: bool) -> None:
        super().__init__()
        self.target = target
        self._run = torch.compile(self._layers, dynamic=False) if compiled else self._layers

    def forward(self, token_ids: Tensor) -> Tensor:
        """Token ids [B, S] -> what enters the LM head [B·S, E]."""
        target, (batch, length) = self.target, token_ids.shape
        target.rotary.reserve(length, target.embedding.weight)
        cos, sin = target.rotary(torch.arange(length, device=token_ids.device).repeat(batch))
        hidden: Tensor = self._run(target.embed(token_ids.flatten()), cos, sin, batch)
        return hidden

    def _layers(self, hidden: Tensor, cos: Tensor, sin: Tensor, batch: int) -> Tensor:
        target, config = self.target, self.target.config
        attend = masked_attention(batch, config.num_heads, config.num_kv_heads, None, causal=True)
        for layer in target.layers:
            hidden = layer(hidden, (cos, sin), attend)
        out: Tensor = target.norm(hidden)
        return out


class TargetTask:
    """Predict every next token; those that assistants did not write count for ``prompt_weight``."""

    def __init__(
        self, config: PretrainConfig, target: Llama, base: Path, corpus: Corpus, valid: Corpus | None, separator: int
    ) -> None:
        self.config, self.network, self.base, self.key = config, target, base, corpus.key
        self.module: nn.Module = TargetForward(target, compiled=config.compile)
        self.depths = 1
        self.source = Packed(corpus, config.max_length, config.batch_tokens, config.seed, separator=separator, name=config.data)
        self.valid: list[Batch] = []
        if valid is not None:
            source = Packed(valid, config.max_length, config.batch_tokens, 0, separator=separator, name=str(config.valid))
            self.valid = held_out(source, config.valid_tokens)

    def loss(
        self, module: nn.Module, batch: Batch, generator: torch.Generator, progress: float, *, agreement: bool
    ) -> tuple[Loss, Tensor]:
        """As in Task; nothing is drawn, and every row has depth 0."""
        with torch.autocast(batch.token_ids.device.type, torch.bfloat16, enabled=self.config.dtype == "bfloat16"):
            hidden = module(batch.token_ids).unflatten(0, batch.token_ids.shape)[:, :-1].flatten(0, 1)
            labels, answers = batch.token_ids[:, 1:].flatten(), batch.response[:, 1:].flatten()
            weights = torch.where(answers, 1.0, self.config.prompt_weight)
            result = cross_entropy(self.network.lm_head.weight, hidden, lambda rows: labels[rows], weights, agreement=agreement)
        each = {"loss": weights, "text": torch.ones_like(weights), "answers": answers}
        parts = {name: Mean((result.losses * counted).sum(), float(counted.sum())) for name, counted in each.items()}
        return Loss(result.mean, parts, result.correct if agreement else None), torch.zeros_like(labels)

    def figures(self, meter: Meter) -> dict[str, Any]:
        """Cross-entropies in nats a token, and how often the likeliest token was right in answers."""
        return {**meter.losses(), "accuracy": meter.accuracy}

    def describe(self, figures: dict[str, Any]) -> str:
        """As in Task."""
        return f"loss {figures['text']:.4f}, of answers {figures['answers']:.4f}, next token right {figures['accuracy'][0]:.3f}"

    def save(self, folder: Path) -> None:
        """As a Hugging Face checkpoint in bfloat16, with the tokenizer and the generation settings that it began with."""
        save_target(self.network, folder, self.base, dtype=torch.bfloat16)
