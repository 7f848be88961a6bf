"""A target's weights as checkpoints have them <-> ours: projections fused, and query heads group-major."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from models.config import DecoderConfig
from models.errors import CheckpointError
from models.layers import DecoderLayer
from models.llama import Llama

STORED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types that weights are read from."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def take(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """A weight of a checkpoint; raises CheckpointError where there is none, or one that is quantized.

    It is looked at before anything is joined: joined with floats, int8 numbers would pass for weights.
    """
    try:
        tensor = tensors[name]
    except KeyError:
        raise CheckpointError(f"the checkpoint has no tensor {name!r}") from None
    check_stored(name, tensor)
    return tensor


def check_stored(name: str, tensor: Tensor) -> None:
    """Raise CheckpointError where a weight's numbers mean nothing without scales, which we do not read."""
    if tensor.dtype not in STORED:
        raise CheckpointError(
            f"{name} is stored as {tensor.dtype}: quantized weights are not supported, use the checkpoint that they were made of"
        )


def ends(config: DecoderConfig) -> dict[str, str]:
    """Our names of a target's weights outside of its layers, and the checkpoint's."""
    head = EMBEDDING if config.tie_word_embeddings else HEAD
    return {"embedding.weight": EMBEDDING, "norm.weight": "model.norm.weight", "lm_head.weight": head}


def check_head(tensors: Mapping[str, Tensor], config: DecoderConfig, folder: Path) -> None:
    """Raise CheckpointError where the LM head is not what the config says: the embedding, or one of its own."""
    if not config.tie_word_embeddings and HEAD not in tensors:
        raise CheckpointError(
            f"{folder} has no {HEAD}: set tie_word_embeddings in config.json if the embedding is the head, else fetch it again"
        )
    if not config.tie_word_embeddings or HEAD not in tensors or EMBEDDING not in tensors:
        return
    if not torch.equal(tensors[EMBEDDING], tensors[HEAD]):
        raise CheckpointError(
            f"config.json says tie_word_embeddings, and {HEAD} is not {EMBEDDING}: set it to false if the head is one of its own"
        )


def decoder_states(
    tensors: Mapping[str, Tensor], config: DecoderConfig, first_layer: int, folder: Path
) -> Iterator[dict[str, Tensor]]:
    """A published target, from ``first_layer`` on, -> ours: what is outside of layers, then one layer after the other.

    Projections are joined as a layer is asked for: all of them together would take as much memory as the target.
    """
    check_head(tensors, config, folder)
    yield {name: take(tensors, theirs) for name, theirs in ends(config).items()}
    with torch.device("meta"):
        shape = Llama(config).borrowed(0)[0]
    for index in range(first_layer, config.num_layers):
        layer = layer_state(tensors, f"model.layers.{index}.", shape)
        yield {f"layers.{index}.{name}": value for name, value in layer.items()}


def layer_state(tensors: Mapping[str, Tensor], prefix: str, layer: DecoderLayer) -> dict[str, Tensor]:
    """One published decoder layer -> our fused, group-major one."""
    try:
        return _fused_layer(tensors, prefix, layer)
    except RuntimeError as error:  # torch refuses to join or split tensors of the wrong shape
        raise CheckpointError(f"{prefix.rstrip('.')} has tensors whose shapes do not fit the config: {error}") from error


def _fused_layer(tensors: Mapping[str, Tensor], prefix: str, layer: DecoderLayer) -> dict[str, Tensor]:
    heads, kv_heads = layer.num_heads, layer.num_kv_heads

    def fused(names: Iterable[str], kind: str) -> Tensor:
        parts = [take(tensors, f"{prefix}{name}.{kind}") for name in names]
        return torch.cat(parts)

    def queries(x: Tensor) -> Tensor:
        return to_group_major(x, kv_heads, 0, heads=heads)

    q_rows = layer.q_size
    state: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        if getattr(layer.qkv, kind) is not None:
            qkv = fused(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), kind)
            if qkv.shape[0] != q_rows + layer.kv_size:
                raise CheckpointError(
                    f"{prefix}self_attn q, k and v {kind}s have {qkv.shape[0]} rows, the config asks for {q_rows + layer.kv_size}"
                )
            state[f"qkv.{kind}"] = torch.cat((queries(qkv[:q_rows]), qkv[q_rows:]))
        if getattr(layer.output, kind) is not None:
            state[f"output.{kind}"] = take(tensors, f"{prefix}self_attn.o_proj.{kind}")
        if getattr(layer.mlp.down, kind) is not None:
            state[f"mlp.gate_up.{kind}"] = fused(("mlp.gate_proj", "mlp.up_proj"), kind)
            state[f"mlp.down.{kind}"] = take(tensors, f"{prefix}mlp.down_proj.{kind}")
    state["output.weight"] = to_group_major(state["output.weight"], kv_heads, 1, heads=heads)
    state["input_norm.weight"] = take(tensors, f"{prefix}input_layernorm.weight")
    state["mlp_norm.weight"] = take(tensors, f"{prefix}post_attention_layernorm.weight")
    for name in ("q_norm", "k_norm"):
        if getattr(layer, name) is not None:
            state[f"{name}.weight"] = take(tensors, f"{prefix}self_attn.{name}.weight")
    return state


def published_layer(layer: DecoderLayer, prefix: str) -> dict[str, Tensor]:
    """Our fused, group-major decoder layer -> a published one."""
    heads, kv_heads = layer.num_heads, layer.num_kv_heads
    published: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        if (qkv := getattr(layer.qkv, kind)) is not None:
            queries, keys, values = qkv.split((layer.q_size, layer.kv_size // 2, layer.kv_size // 2))
            published[f"self_attn.q_proj.{kind}"] = to_group_major(queries, kv_heads, 0, heads=heads, inverse=True)
            published[f"self_attn.k_proj.{kind}"], published[f"self_attn.v_proj.{kind}"] = keys, values
        if (gate_up := getattr(layer.mlp.gate_up, kind)) is not None:
            published[f"mlp.gate_proj.{kind}"], published[f"mlp.up_proj.{kind}"] = gate_up.chunk(2)
            published[f"mlp.down_proj.{kind}"] = getattr(layer.mlp.down, kind)
    published["self_attn.o_proj.weight"] = to_group_major(layer.output.weight, kv_heads, 1, heads=heads, inverse=True)
    if layer.output.bias is not None:
        published["self_attn.o_proj.bias"] = layer.output.bias
    published["input_layernorm.weight"] = layer.input_norm.weight
    published["post_attention_layernorm.weight"] = layer.mlp_norm.weight
    for name in ("q_norm", "k_norm"):
        if (norm := getattr(layer, name)) is not None:
            published[f"self_attn.{name}.weight"] = norm.weight
    return {f"{prefix}{name}": tensor for name, tensor in published.items()}


def to_group_major(x: Tensor, kv_heads: int, dim: int, *, heads: int, inverse: bool = False) -> Tensor:
    """Reorder query heads along ``dim`` from [kv head, group] to [group, kv head], or back."""
    groups = heads // kv_heads
    outer = (groups, kv_heads) if inverse else (kv_heads, groups)
    size = x.shape[dim] // heads
    out: Tensor = x.unflatten(dim, (*outer, size)).transpose(dim, dim + 1).flatten(dim, dim + 2)
    return out
