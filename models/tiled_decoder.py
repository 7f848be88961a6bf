"""The target's layers, and its head, by one operator each; see the ``.cpp`` of these names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from models import cached_attention, tiled_linear
from models.layers import DecoderLayer, Linear
from models.llama import Later, Llama
from models.tiles import operator_class


def suits(target: Llama) -> bool:
    """Whether the operator does what ``target`` does: no biases but of queries, keys and values, and sizes that fill tiles."""
    config = target.config
    if not cached_attention.suits(target.dtype, config.head_dim) or config.output_bias or config.mlp_bias:
        return False
    linears = [module for layer in target.layers for module in layer.modules() if isinstance(module, Linear)]
    return all(tiled_linear.suits(linear.weight) for linear in linears)


def suits_whole(target: Llama) -> bool:
    """Whether operators do all that ``target`` does; it may be on the meta device, without weights."""
    return suits(target) and suits_head(target)


def tiled_decoder(target: Llama, *, released: int = 0) -> TiledLayers:
    """Stands in for ``target``'s layers as ``compiled.decoder_graph`` does, with a copy of their weights.

    The first ``released`` layers give their own back, one by one, so that there is never more than a layer of both.
    ``graph_runner.load_runner`` must have been called. Other threads go on while it runs.
    """
    config = target.config
    target.rotary.reserve(config.max_position_embeddings, target.embedding.weight)
    # A cache has reserved some more: trees reach past the end of a text that has little room left.
    cos, sin = target.rotary(torch.arange(len(target.rotary)))
    others = [target.embedding.weight.detach(), cos[:, 0, 0], sin[:, 0, 1], target.norm.weight.detach()]
    dense = [tensor.to(target.dtype).contiguous() for tensor in others]
    layers = [layer for layer in target.layers if isinstance(layer, DecoderLayer)]
    size = sum(parameter.nbytes for parameter in target.layers.parameters())
    weights = tiled_linear.in_one_piece(_weights(layers, released), size)
    weights += [tensor for layer in layers for tensor in _other_tensors(layer)]
    sizes = config.num_kv_heads, config.head_dim, config.rms_norm_eps
    return TiledLayers(operator_class("Decoder", target.dtype)(dense + weights, *sizes))


def _weights(layers: list[DecoderLayer], released: int) -> Iterator[Tensor]:
    """What the operators read of each layer in turn, to be copied at once; of some of them nothing is left after that."""
    for index, layer in enumerate(layers):
        yield from layer_tensors(layer)
        if index < released:
            for module in layer.modules():
                if isinstance(module, Linear):
                    module.release()


class TiledLayers:
    """An ``operator`` as ``Llama.compiled``: LayersInTwoGoes."""

    def __init__(self, operator: Any) -> None:
        self.operator = operator

    def __call__(self, inputs: list[Tensor], wanted: int = 0) -> list[Tensor]:
        """As in CompiledLayers."""
        return self._run(inputs, wanted, wanted)

    def in_two_goes(self, inputs: list[Tensor], wanted: int, told: int) -> tuple[Tensor, Later]:
        """As in LayersInTwoGoes."""
        hidden, *unfinished = self._run(inputs, wanted, told)
        if not unfinished:
            return hidden, lambda: hidden
        return hidden, lambda: torch.cat((self.operator.finish(*unfinished), hidden))

    def _run(self, inputs: list[Tensor], wanted: int, later: int) -> list[Tensor]:
        out: list[Tensor] = self.operator.run([each.contiguous() for each in inputs], wanted, later)
        return out


def suits_head(target: Llama) -> bool:
    """Whether the operator does what ``target``'s LM head does."""
    return target.lm_head.bias is None and tiled_linear.suits(target.lm_head.weight)


def tiled_head(target: Llama) -> Any:
    """An operator that runs as a graph: hidden states [n, E] -> logits [n, V] in float32, and each row's best token [n].

    It has a copy of the weight. Rounded to bfloat16, one row of logits in twenty or so would have two that are largest.
    """
    weight = tiled_linear.tiled(target.lm_head.weight.detach())
    return operator_class("Head", target.dtype)(weight)


def layer_tensors(layer: DecoderLayer) -> list[Tensor]:
    """What the operators read of a layer."""
    return [
        layer.input_norm.weight.detach(),
        tiled_linear.tiled(layer.qkv.weight.detach()),
        tiled_linear.tiled(layer.output.weight.detach()),
        layer.mlp_norm.weight.detach(),
        tiled_linear.tiled(in_turns(layer.mlp.gate_up.weight.detach())),
        tiled_linear.tiled(layer.mlp.down.weight.detach()),
    ]


def _other_tensors(layer: DecoderLayer) -> list[Tensor]:
    """What not all layers have; what this one lacks is empty."""
    norms = [None if norm is None else norm.weight for norm in (layer.q_norm, layer.k_norm)]
    nothing = layer.qkv.weight.new_empty(0)
    return [nothing if each is None else each.detach().contiguous() for each in (layer.qkv.bias, *norms)]


def in_turns(gate_up: Tensor) -> Tensor:
    """Gates [I, E] above what they let through [I, E] -> 16 of these, 16 of those, and so on."""
    gates, ups = gate_up.chunk(2)
    return torch.stack((gates.unflatten(0, (-1, 16)), ups.unflatten(0, (-1, 16))), dim=1).flatten(0, 2)
