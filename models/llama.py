"""The target: one decoder for Llama 2/3, Mistral, Qwen2/2.5 and Qwen3."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import AttentionPlan, cached_attention, masked_attention
from models.config import DecoderConfig
from models.digest import WeightSample, weight_samples
from models.kv_cache import KVCache, KVWindow, lsa_layout
from models.layers import DecoderLayer, Linear, RMSNorm, RotaryTable, draw

CompiledGraph = Callable[[list[Tensor]], list[Tensor]]
"""Stands in for a part of a network: from its inputs, in a flat list, to its outputs (``models.compiled``)."""


Later = Callable[[], Tensor]
"""What brings rows that are not worked out before they are asked for, once."""


class CompiledLayers(Protocol):
    """Stands in for embedding, layers and final norm, as the graph of ``models.compiled`` does."""

    def __call__(self, inputs: list[Tensor], wanted: int = 0) -> list[Tensor]:
        """As a CompiledGraph; of a single text's rows those from ``wanted`` on may be asked for."""


@runtime_checkable
class LayersInTwoGoes(CompiledLayers, Protocol):
    """Such as need not work out all of a prompt at once."""

    def in_two_goes(self, inputs: list[Tensor], wanted: int, told: int) -> tuple[Tensor, Later]:
        """A single text's rows from ``wanted`` on at once, those from ``told`` on (as far, or before) later."""


def of_all_rows(graph: CompiledGraph) -> CompiledLayers:
    """By a graph that works all rows out."""
    return lambda inputs, wanted=0: [graph(inputs)[0][wanted:]]


@dataclass(frozen=True, slots=True)
class TargetActivations:
    """What a drafter learns from: keys and values in LSA's layout, the final hidden state, and the input of layer L−N if asked.

    ``kv`` [B, S, L, E_kv], ``hidden`` [B, S, E] after the final norm, ``layer_input`` [B, S, E] or None; ``tapped`` [B, S, taps·E]
    as in ``Llama.forward_tapped``, None unless asked for.
    """

    kv: Tensor
    hidden: Tensor
    layer_input: Tensor | None
    tapped: Tensor | None = None

    def to(self, device: torch.device) -> TargetActivations:
        """The same on another device."""
        parts = (self.kv, self.hidden, self.layer_input, self.tapped)
        kv, hidden, layer_input, tapped = (None if part is None else part.to(device, non_blocking=True) for part in parts)
        assert kv is not None and hidden is not None
        return TargetActivations(kv, hidden, layer_input, tapped)


class Llama(nn.Module):
    """Decoder-only transformer with explicit inputs: tokens, an attention plan and a cache that the caller owns.

    ``compiled``, where there is one, stands in for embedding, layers and final norm: see ``models.compiled``.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        weight = torch.empty(config.vocab_size, config.hidden_size)
        self.embedding: nn.Embedding = nn.Embedding.from_pretrained(weight, freeze=False)
        draw(self.embedding.weight, std=1.0)
        self.layers = nn.ModuleList(
            DecoderLayer(
                config.hidden_size,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                config.intermediate_size,
                config.rms_norm_eps,
                attention_bias=config.attention_bias,
                output_bias=config.output_bias,
                mlp_bias=config.mlp_bias,
                qk_norm=config.qk_norm,
            )
            for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.tie_embeddings()
        self.rotary = RotaryTable(config.head_dim, config.rope)
        self.compiled: CompiledLayers | None = None

    def tie_embeddings(self) -> None:
        """Let the LM head share the embedding's weights."""
        weight = self.embedding.weight
        assert isinstance(weight, nn.Parameter)
        self.lm_head.weight = weight

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.weight.device

    def new_cache(self, num_slots: int, scratch: int, length: int) -> KVCache:
        """A cache for this model: ``num_slots`` sequences of up to ``length`` tokens, and ``scratch`` tree rows each."""
        c = self.config
        self.rotary.reserve(length + scratch, self.norm.weight)
        return KVCache(c.num_layers, num_slots, scratch, length, c.num_kv_heads, c.head_dim, dtype=self.dtype, device=self.device)

    @property
    def embeddings(self) -> Tensor:
        """Of all tokens [V, E]."""
        return self.embedding.weight

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids [...] -> embeddings [..., E]."""
        return F.embedding(token_ids, self.embedding.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """What enters the LM head [n, E] -> logits [n, V]."""
        out: Tensor = self.lm_head(hidden)
        return out

    def head_over(self, vocabulary: Tensor | None) -> Linear:
        """The LM head cut to the token ids ``vocabulary`` [K]; None stands for all."""
        return self.lm_head if vocabulary is None else self.lm_head.select(vocabulary)

    def forward(self, token_ids: Tensor, plan: AttentionPlan, cache: KVCache, wanted: int = 0) -> Tensor:
        """Token ids [n = batch·rows] -> hidden states after the final norm [n, E]; their keys and values go into ``cache``.

        Of one text's rows only those from ``wanted`` on may be asked for: [n − wanted, E].
        """
        if self.compiled is None:
            return self.run_layers(self.embed(token_ids), plan, cache, first_layer=0)[wanted:]
        return self.compiled(_compiled_inputs(token_ids, plan, cache), wanted)[0]

    def forward_tapped(
        self, token_ids: Tensor, plan: AttentionPlan, cache: KVCache, taps: Sequence[int], wanted: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """As ``forward``, and beside it the outputs of layers ``taps`` [n, taps·E]: 1 is the first, the last has the final norm.

        None without taps. Inner layers can only be tapped where nothing is compiled.
        """
        if all(tap == self.config.num_layers for tap in taps):
            hidden = self(token_ids, plan, cache, wanted)
            return hidden, (hidden if len(taps) == 1 else hidden.repeat(1, len(taps))) if taps else None
        outputs: list[Tensor] = []
        hidden = self.run_layers(self.embed(token_ids), plan, cache, first_layer=0, outputs=outputs)
        return hidden[wanted:], torch.cat([outputs[tap - 1][wanted:] for tap in taps], dim=-1)

    def read(
        self, token_ids: Tensor, plan: AttentionPlan, cache: KVCache, taps: Sequence[int], wanted: int, told: int
    ) -> tuple[Tensor, Later | None]:
        """A stretch of a prompt: hidden states of rows from ``wanted`` on, and what brings the taps of those from ``told`` on.

        ``told`` is no more than ``wanted``. Where layers can, the last one's output of rows between waits until then.
        """
        if isinstance(self.compiled, LayersInTwoGoes) and tuple(taps) == (self.config.num_layers,):
            return self.compiled.in_two_goes(_compiled_inputs(token_ids, plan, cache), wanted, told)
        hidden, tapped = self.forward_tapped(token_ids, plan, cache, taps, told if taps else wanted)
        if tapped is None:
            return hidden, None
        kept = tapped.clone()  # a part would keep all of what was read
        return hidden[wanted - told :], lambda: kept

    def run_layers(
        self,
        hidden: Tensor,
        plan: AttentionPlan,
        cache: KVCache | KVWindow,
        *,
        first_layer: int,
        outputs: list[Tensor] | None = None,
    ) -> Tensor:
        """Run the layers from ``first_layer`` on and the final norm: [n, E] -> [n, E]; each layer's output goes to ``outputs``."""
        rope = self.rotary(plan.positions)
        for index in range(first_layer, self.config.num_layers):
            layer = self.layers[index]
            assert isinstance(layer, DecoderLayer)
            hidden = layer(hidden, rope, cached_attention(cache, index, plan, layer.num_heads))
            if outputs is not None:
                outputs.append(hidden)
        out: Tensor = self.norm(hidden)
        if outputs:
            outputs[-1] = out
        return out

    @torch.no_grad()
    def encode(self, token_ids: Tensor, *, layer_input: int | None = None, taps: Sequence[int] = ()) -> TargetActivations:
        """Run whole sequences [B, S] causally without a cache, keeping what drafters are trained on.

        ``layer_input`` names the layer whose input is kept (L−N for a drafter with N borrowed layers), ``taps`` the layers whose
        outputs are, as in ``forward_tapped``.
        """
        c = self.config
        batch, length = token_ids.shape
        self.rotary.reserve(length, self.embedding.weight)
        rope = self.rotary(torch.arange(length, device=token_ids.device).repeat(batch))
        hidden = self.embed(token_ids.flatten())
        kept: Tensor | None = None
        kv: list[Tensor] = []
        outputs: dict[int, Tensor] = {}
        inner = masked_attention(batch, c.num_heads, c.num_kv_heads, None, causal=True)

        def attend(queries: Tensor, keys_values: Tensor) -> Tensor:
            kv.append(keys_values)
            return inner(queries, keys_values)

        for index, layer in enumerate(self.layers):
            if index == layer_input:
                kept = hidden.view(batch, length, -1)
            hidden = layer(hidden, rope, attend)
            if index + 1 in taps:
                outputs[index + 1] = hidden
        hidden = outputs[c.num_layers] = self.norm(hidden)
        stacked = lsa_layout(torch.stack(kv, dim=1), c.num_kv_heads, c.head_dim).view(batch, length, c.num_layers, c.kv_size)
        tapped = torch.cat([outputs[tap] for tap in taps], dim=-1).view(batch, length, -1) if taps else None
        return TargetActivations(stacked, hidden.view(batch, length, -1), kept, tapped)

    def weight_samples(self) -> Iterator[WeightSample]:
        """As ``digest.weight_samples``."""
        return weight_samples(self)

    def release_layers(self, end: int) -> None:
        """Give back the weights of layers before ``end`` of which there are copies; run_layers then needs a packed model."""
        for layer in self.layers[:end]:
            for module in layer.modules():
                if isinstance(module, Linear) and (module.packed or self.compiled is not None):
                    module.release()

    def borrowed(self, first_layer: int) -> Sequence[DecoderLayer]:
        """The last layers, from ``first_layer`` on, for a drafter that runs through them."""
        return [layer for layer in self.layers[first_layer:] if isinstance(layer, DecoderLayer)]


def _compiled_inputs(token_ids: Tensor, plan: AttentionPlan, cache: KVCache) -> list[Tensor]:
    shape = (plan.batch, plan.rows)
    write = plan.write - plan.first_slot * cache.rows_per_slot if plan.first_slot else plan.write
    window = cache.window(plan.first_slot, plan.batch)
    return [token_ids.view(shape), plan.positions.view(shape), write.view(shape), plan.mask, *window]
