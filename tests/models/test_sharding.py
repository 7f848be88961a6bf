"""Which part of a checkpoint each rank reads, and that the parts are the whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from models.config import DecoderConfig
from models.digest import sample_places
from models.errors import CheckpointError
from models.kv_cache import heads_of, join_heads
from models.orders import kinds, packed, unpacked
from models.sharded_llama import load_follower, load_leading
from models.sharding import Part, ShardedTensors, layout_of, own_places, sharded
from tests.models.test_llama_parity import FAMILIES, VOCAB, Pair

SHARED = [name for name in FAMILIES if name != "llama-one-kv-head"]
DEVICE = torch.device("cpu")


def parts_of(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Both ranks' weights, by our names."""
    first = load_leading(folder, 2, dtype=torch.float32, device=DEVICE)
    second = load_follower(folder, Part(1, 2), dtype=torch.float32, device=DEVICE)
    return dict(first.named_parameters(remove_duplicate=False)), dict(second.network.named_parameters())


@pytest.mark.parametrize("family", SHARED)
def test_two_ranks_parts_together_are_the_model(family: str, tmp_path: Path) -> None:
    whole = Pair(family, tmp_path).model
    first, second = parts_of(tmp_path)
    expected = dict(whole.named_parameters(remove_duplicate=False))
    assert first.keys() == expected.keys()
    assert second.keys() == expected.keys() - {"embedding.weight"}
    for name, tensor in expected.items():
        if (layout := layout_of(name, whole.config)) is not None:
            assert 2 * first[name].numel() == tensor.numel()
            joined = layout.join([first[name], second[name]])
        elif name.endswith(("output.bias", "down.bias")):
            joined = first[name] + second[name]  # which is what ranks do with their outputs
            assert not second[name].any()
        elif name == "lm_head.weight":
            assert torch.equal(first[name], tensor)  # drafters need it whole
            joined = torch.cat((first[name][:49], second[name]))[:VOCAB]
            assert not second[name][48:].any()  # 97 tokens are 49 and 48
        else:
            joined = first[name]
            assert name not in second or torch.equal(first[name], second[name])
        assert torch.equal(joined, tensor), name


def test_a_ranks_layer_computes_its_part_of_the_layer(tmp_path: Path) -> None:
    # What two ranks give without the sum between them, added up by hand, is what one gives.
    whole = Pair("llama-biases", tmp_path).model
    first, second = parts_of(tmp_path)
    layer, rows = whole.layers[1], torch.randn(5, 48)
    gate_up = [part["layers.1.mlp.gate_up.weight"] for part in (first, second)]
    biases = [part["layers.1.mlp.gate_up.bias"] for part in (first, second)]
    total = torch.zeros(5, 48)
    for weight, bias, part in zip(gate_up, biases, (first, second), strict=True):
        gate, up = torch.nn.functional.linear(rows, weight, bias).chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up
        total += torch.nn.functional.linear(inner, part["layers.1.mlp.down.weight"], part["layers.1.mlp.down.bias"])
    torch.testing.assert_close(total, layer.mlp(rows))


def test_a_rank_reads_nothing_but_its_part(tmp_path: Path) -> None:
    Pair("llama", tmp_path)
    tensors = ShardedTensors(tmp_path, Part(1, 2))
    layer = "model.layers.0."
    try:
        sizes = {name: tuple(tensors[f"{layer}{name}.weight"].shape) for name in ("self_attn.q_proj", "self_attn.o_proj")}
        assert sizes == {"self_attn.q_proj": (24, 48), "self_attn.o_proj": (48, 24)}
        assert tuple(tensors[f"{layer}mlp.down_proj.weight"].shape) == (48, 40)
        assert tuple(tensors["model.norm.weight"].shape) == (48,)
    finally:
        tensors.close()


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("heads", [1, 3])
def test_sizes_that_cannot_be_shared_are_refused_by_the_options_name(tmp_path: Path, size: int, heads: int) -> None:
    config = replace(Pair("llama", tmp_path).model.config, num_heads=6, num_kv_heads=heads)
    with pytest.raises(CheckpointError, match=rf"--tensor-parallel-size {size} does not divide.*num_key_value_heads \({heads}\)"):
        sharded(config, size)


def test_a_refusal_says_what_sizes_there_are(tmp_path: Path) -> None:
    config: DecoderConfig = replace(Pair("llama", tmp_path).model.config, num_heads=12, num_kv_heads=12, intermediate_size=80)
    with pytest.raises(CheckpointError, match=r"intermediate_size \(80\); it can be 1, 2, 4$"):
        sharded(config, 3)
    assert sharded(config, 4).num_kv_heads == 3


@pytest.mark.parametrize("family", ["llama-biases", "qwen3"])
def test_samples_of_a_weight_come_from_the_ranks_that_have_them(family: str, tmp_path: Path) -> None:
    whole = Pair(family, tmp_path).model
    parts = parts_of(tmp_path)
    for name, tensor in whole.named_parameters():
        if (layout := layout_of(name, whole.config)) is None:
            continue
        places = torch.tensor(sample_places(tensor.numel()))
        numbers = torch.zeros(len(places))
        for rank, part in enumerate(parts):
            own, local = own_places(places, layout.shape(tuple(tensor.shape)), layout.dim + layout.axis, Part(rank, 2))
            assert 0 < own.sum() < len(places)
            numbers += torch.where(own, part[name].flatten()[local], 0.0)
        assert torch.equal(numbers, tensor.flatten()[places]), name


def test_rows_of_a_cache_are_cut_by_heads_and_joined_again() -> None:
    # Two heads of two numbers: keys k0 k1, then values v0 v1.
    row = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])
    first, second = (heads_of(row, slice(head, head + 1), 2, 2) for head in (0, 1))
    assert first.tolist() == [[1, 2, 5, 6]]
    assert second.tolist() == [[3, 4, 7, 8]]
    assert torch.equal(join_heads([first, second], 2), row)


def test_tensors_told_are_those_that_arrive() -> None:
    tensors = [torch.arange(3), torch.tensor([[True], [False]]), torch.randn(2, 3), torch.empty(0, 4), torch.randn(3).bfloat16()]
    there = unpacked(packed(tensors), kinds(tensors))
    assert [each.dtype for each in there] == [each.dtype for each in tensors]
    assert all(torch.equal(one, other) for one, other in zip(there, tensors, strict=True))


def test_a_part_without_a_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    config = FAMILIES["llama"][1]
    model = LlamaForCausalLM(config)
    state = {name: tensor for name, tensor in model.state_dict().items() if "layers.2.mlp.up_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        load_follower(tmp_path, Part(1, 2), dtype=torch.float32, device=DEVICE)
