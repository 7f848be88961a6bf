"""The drafter's teacher-forced pass over whole sequences, as plainly as may be: what `training.forward` is held against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.attention import full_attention, masked_attention
from models.llama import Llama, TargetActivations
from models.moa import MoA, tokens_before


@dataclass(frozen=True, slots=True)
class DraftActivations:
    """All [B, S, E]: ``feature`` enters the LM head, ``predicted_input`` (N > 0) leaves CA."""

    feature: Tensor
    predicted_input: Tensor | None


def plain_forward(
    moa: MoA,
    target: Llama,
    token_ids: Tensor,
    activations: TargetActivations,
    sa_mask: Tensor,
    ca_mask: Tensor,
    boundaries: Tensor,
) -> DraftActivations:
    """Of drafters without a block; arguments as in `DraftForward`."""
    batch, length = token_ids.shape
    sizes = moa.config.target
    memory = moa.memory(activations.kv.flatten(0, 1), activations.hidden.flatten(0, 1))
    moa.rotary.reserve(length, memory)
    rope = moa.rotary(torch.arange(length).repeat(batch))
    embeddings, before = target.embed(token_ids), None
    if moa.config.paired:
        previous = target.embed(tokens_before(token_ids))
        memory, before = moa.of_pairs(memory, embeddings, previous), previous.flatten(0, 1)
    last = torch.where(boundaries, torch.arange(length), 0).cummax(dim=1).values
    newest = memory.view(batch, length, -1).gather(1, last.unsqueeze(-1).expand(-1, -1, memory.shape[-1])).flatten(0, 1)
    attend = masked_attention(batch, sizes.num_heads, moa.config.sa_num_kv_heads, sa_mask)
    hidden = moa.attend_to_tokens(embeddings.flatten(0, 1), before, newest, rope, attend)
    queries = moa.cross_queries(hidden, rope).unflatten(0, (batch, length))
    keys, values = moa.cross_keys_values(memory, rope).view(batch, length, 2, -1, sizes.head_dim).unbind(2)
    predicted = moa.leave(hidden, full_attention(queries, keys, values, ca_mask).flatten(0, 1)).view(batch, length, -1)
    borrowed = moa.config.target_layer_inference
    if borrowed == 0:
        return DraftActivations(predicted, None)
    assert activations.layer_input is not None
    stream = torch.where(boundaries.unsqueeze(-1), activations.layer_input.to(predicted), predicted).flatten(0, 1)
    target.rotary.reserve(length, target.embedding.weight)
    rope = target.rotary(torch.arange(length).repeat(batch))
    attend = masked_attention(batch, sizes.num_heads, sizes.num_kv_heads, None, causal=True)
    for layer in target.borrowed(sizes.num_layers - borrowed):
        stream = layer(stream, rope, attend)
    return DraftActivations(target.norm(stream).view(batch, length, -1), predicted)
