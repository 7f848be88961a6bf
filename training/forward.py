"""The drafter's teacher-forced pass, arranged for training: the same numbers as ``MoA.forward`` for a fraction of the work.

SA is a single layer over token embeddings, so only positions whose proposal is wanted need its queries and MLP, and likewise CA's.
LSA reads every token, in chunks that fit a CPU's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import full_attention, masked_attention
from models.layers import DecoderLayer, Rope, rotate
from models.llama import Llama, TargetActivations
from models.moa import MoA, attention_over_layers

CPU_CHUNK = 256
"""Tokens whose layers LSA reads at a time on a CPU; measured, 128 to 512 are alike, all at once is a third slower."""

GPU_CHUNK = 16384


@dataclass(frozen=True, slots=True)
class DraftRows:
    """What the drafter proposes at R wanted positions: ``feature`` [R, E] enters the LM head, ``predicted_input`` as in MoA."""

    feature: Tensor
    predicted_input: Tensor | None


class DraftForward(nn.Module):
    """A MoA drafter's training pass as a module, so that `accelerate` can wrap it. ``compiled`` fuses LSA with torch.compile."""

    def __init__(self, moa: MoA, *, compiled: bool = False) -> None:
        super().__init__()
        self.moa = moa
        self._read_layers: Callable[[Tensor, Rope], Tensor] = self._lsa
        if compiled:
            self._read_layers = torch.compile(self._lsa, dynamic=False)

    def forward(
        self,
        target: Llama,
        token_ids: Tensor,
        truth: TargetActivations,
        sa_mask: Tensor,
        ca_mask: Tensor,
        boundaries: Tensor,
        wanted: Tensor,
    ) -> DraftRows:
        """Arguments as in ``MoA.forward``, and ``wanted`` [B, S] boolean: the positions to return, in row-major order."""
        moa = self.moa
        inferred = moa.config.target_layer_inference
        # The borrowed layers of later positions read what was predicted for every drafted one.
        computed = wanted | ~boundaries if inferred else wanted
        rows = computed.flatten().nonzero().squeeze(1)
        memory = self.memory(truth.kv.flatten(0, 1))
        predicted = self._cross_attend(target, token_ids, memory, sa_mask, ca_mask, computed, rows)
        if not inferred:
            return DraftRows(predicted, None)
        kept = wanted.flatten().index_select(0, rows).nonzero().squeeze(1)
        feature = self._through_borrowed(target, predicted, truth, boundaries, rows)
        return DraftRows(feature.index_select(0, rows.index_select(0, kept)), predicted.index_select(0, kept))

    def memory(self, kv: Tensor) -> Tensor:
        """Layer self-attention of n tokens: [n, L, E_kv] -> [n, E]."""
        moa = self.moa
        count, layers, _ = kv.shape
        size = min(count, CPU_CHUNK if kv.device.type == "cpu" else GPU_CHUNK)
        moa.layer_rotary.reserve(layers, kv)
        rope = moa.layer_rotary(torch.arange(layers, device=kv.device).repeat(size))
        # All chunks are alike, the last one filled up: one shape to compile and to keep oneDNN's kernels for.
        kv = F.pad(kv, (0, 0, 0, 0, 0, -count % size))
        return torch.cat([self._read_layers(part, rope) for part in kv.split(size)])[:count]

    def _lsa(self, kv: Tensor, rope: Rope) -> Tensor:
        moa = self.moa
        count, layers, _ = kv.shape
        out: Tensor = moa.lsa(kv.flatten(0, 1), rope, attention_over_layers(count, moa.lsa, kv.device))
        memory: Tensor = moa.to_memory(out.view(count, layers, -1).mean(dim=1))
        return memory

    def _cross_attend(
        self, target: Llama, token_ids: Tensor, memory: Tensor, sa_mask: Tensor, ca_mask: Tensor, wanted: Tensor, rows: Tensor
    ) -> Tensor:
        """SA and CA at the wanted positions: [R, E]."""
        moa = self.moa
        batch, length = token_ids.shape
        head_dim = moa.config.target.head_dim
        moa.rotary.reserve(length, memory)
        positions = torch.arange(length, device=token_ids.device)
        rope = moa.rotary(positions.repeat(batch))
        own_rope = (rope[0].index_select(0, rows), rope[1].index_select(0, rows))
        # Sequences have different numbers of wanted positions: queries are padded to the largest.
        most = max(1, int(wanted.sum(dim=1).max()))
        slots = (torch.arange(batch, device=rows.device).unsqueeze(1) * most + wanted.cumsum(dim=1) - 1).flatten()
        slots = slots.index_select(0, rows)
        padded = torch.zeros(batch * most, dtype=torch.long, device=rows.device).index_copy_(0, slots, rows % length)
        mask_rows = padded.view(batch, most, 1).expand(-1, -1, length)

        def attend(queries: Tensor, keys_values: Tensor, mask: Tensor) -> Tensor:
            keys, values = keys_values.view(batch, length, 2, -1, head_dim).unbind(2)
            filled = queries.new_zeros(batch * most, *queries.shape[1:]).index_copy(0, slots, queries)
            seen = mask.expand(batch, 1, length, length).squeeze(1).gather(1, mask_rows).unsqueeze(1)
            out = full_attention(filled.view(batch, most, *queries.shape[1:]), keys, values, seen)
            return out.flatten(0, 1).index_select(0, slots)

        embeddings = target.embed(token_ids.flatten())
        own = embeddings.index_select(0, rows)
        attended = attend(_queries(moa.sa, own, own_rope), moa.self_keys_values(embeddings, rope), sa_mask)
        hidden = moa.sa.finish(own, attended)
        attended = attend(_queries(moa.ca, hidden, own_rope), moa.cross_keys_values(memory, rope), ca_mask)
        out: Tensor = moa.ca.finish(hidden, attended)
        return out

    def _through_borrowed(
        self, target: Llama, predicted: Tensor, truth: TargetActivations, boundaries: Tensor, rows: Tensor
    ) -> Tensor:
        """The target's last N layers over predicted inputs, with the true input at boundaries: [B·S, E]."""
        if truth.layer_input is None:
            raise ValueError("a drafter with borrowed layers needs activations encoded with layer_input")
        config = self.moa.config.target
        batch, length, _ = truth.layer_input.shape
        true = truth.layer_input.flatten(0, 1).to(predicted.dtype)
        hidden = torch.where(boundaries.flatten().unsqueeze(-1), true, true.index_copy(0, rows, predicted))
        target.rotary.reserve(length, target.embedding.weight)
        rope = target.rotary(torch.arange(length, device=hidden.device).repeat(batch))
        attend = masked_attention(batch, config.num_heads, config.num_kv_heads, None, causal=True)
        for layer in target.borrowed(config.num_layers - self.moa.config.target_layer_inference):
            hidden = layer(hidden, rope, attend)
        out: Tensor = target.norm(hidden)
        return out


def _queries(layer: DecoderLayer, x: Tensor, rope: Rope) -> Tensor:
    """Rows [R, E] -> a layer's rotated queries [R, h, d]."""
    bias = layer.qkv.bias[: layer.q_size] if layer.qkv.bias is not None else None
    queries: Tensor = F.linear(layer.input_norm(x), layer.qkv.weight[: layer.q_size], bias)
    return rotate(queries.unflatten(-1, (-1, layer.head_dim)), rope)
