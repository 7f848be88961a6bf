"""Our decoder against transformers on tiny random checkpoints, in float32, wherever a token's logits can come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from models.llama import Llama
from models.loader import load_target, optimize_for_inference
from tests.models.plans import chain, lineage, padded, plan, tree

VOCAB = 97
# Six query heads on two KV heads: groups of three tell apart every order in which heads could be laid out.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
# Head size 8 and theta 100: wavelengths 6, 20, 63 and 199, so llama3 scaling keeps one, blends one and divides two.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# There YaRN keeps the first of four frequencies, blends two and divides the last; blends end at whole pairs, or where they would.
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 8.0}
YARN_IN_FULL = {**YARN, "beta_slow": 0.5, "truncate": False, "mscale": 0.8, "mscale_all_dim": 0.3}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=DEFAULT)),
    "llama-rope-llama3": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=LLAMA3)),
    "llama-rope-linear": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=LINEAR)),
    "llama-rope-yarn": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=YARN)),
    "qwen3-rope-yarn": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=8, rope_parameters=YARN_IN_FULL)),
    "llama-biases": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=DEFAULT, attention_bias=True, mlp_bias=True)),
    "llama-one-kv-head": (LlamaForCausalLM, LlamaConfig(**{**SIZES, "num_key_value_heads": 1}, rope_parameters=DEFAULT)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=None)),
    "mistral-head-dim": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=None, head_dim=16)),
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config(**{**SIZES, "tie_word_embeddings": True})),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16)),
    "qwen3-tied": (Qwen3ForCausalLM, Qwen3Config(**{**SIZES, "tie_word_embeddings": True}, head_dim=16)),
}


class Pair:
    """The same weights in transformers and in our decoder."""

    def __init__(self, family: str, folder: Path) -> None:
        torch.manual_seed(sum(map(ord, family)))
        model_class, config = FAMILIES[family]
        self.reference = model_class(config).eval()
        with torch.no_grad():
            for name, parameter in self.reference.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(std=0.3)
                elif "norm" in name:
                    parameter.uniform_(0.5, 1.5)
        self.reference.save_pretrained(folder, max_shard_size="30KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
        self.model: Llama = load_target(folder, dtype=torch.float32)[0]

    @torch.no_grad()
    def expected(self, tokens: Sequence[int]) -> Tensor:
        """Logits [S, V] of a whole sequence, by transformers."""
        logits: Tensor = self.reference(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_whole_sequences_without_a_cache(pair: Pair) -> None:
    sequences = [random_tokens(50, seed=1), random_tokens(50, seed=2)]
    activations = pair.model.encode(torch.tensor(sequences))
    for tokens, hidden in zip(sequences, activations.hidden, strict=True):
        assert_close(pair.model.logits(hidden), pair.expected(tokens))


def test_prefill_in_one_piece(pair: Pair) -> None:
    tokens = random_tokens(50, seed=3)
    cache = pair.model.new_cache(num_slots=1, scratch=4, length=60)
    hidden = pair.model(torch.tensor(tokens), plan(cache, pair.model.config.groups, [chain(0, 50)]), cache)
    assert_close(pair.model.logits(hidden), pair.expected(tokens))


def test_prefill_in_chunks(pair: Pair) -> None:
    tokens = random_tokens(50, seed=4)
    cache = pair.model.new_cache(num_slots=1, scratch=4, length=60)
    pieces = []
    for start, end in ((0, 16), (16, 17), (17, 40), (40, 50)):
        step = plan(cache, pair.model.config.groups, [chain(start, end - start)])
        pieces.append(pair.model(torch.tensor(tokens[start:end]), step, cache))
    assert_close(pair.model.logits(torch.cat(pieces)), pair.expected(tokens))


def test_of_a_stretch_the_rows_that_are_wanted(pair: Pair) -> None:
    tokens, layers = torch.tensor(random_tokens(20, seed=4)), pair.model.config.num_layers
    whole, part = (pair.model.new_cache(num_slots=1, scratch=4, length=60) for _ in range(2))
    step = plan(whole, pair.model.config.groups, [chain(0, 20)])
    for taps in ((1, layers), (layers,)):
        hidden, tapped = pair.model.forward_tapped(tokens, step, whole, taps)
        last, of_last = pair.model.forward_tapped(tokens, step, part, taps, wanted=17)
        assert tapped is not None and of_last is not None
        assert torch.equal(last, hidden[17:]) and torch.equal(of_last, tapped[17:])
        last, later = pair.model.read(tokens, step, part, taps, wanted=19, told=4)
        assert later is not None
        assert torch.equal(last, hidden[19:]) and torch.equal(later(), tapped[4:])
    last, later = pair.model.read(tokens, step, part, (), wanted=19, told=4)
    assert torch.equal(last, hidden[19:]) and later is None
    assert torch.equal(part.data, whole.data)
    assert len(pair.model(tokens, step, part, wanted=20)) == 0


def test_decoding_token_by_token(pair: Pair) -> None:
    tokens = random_tokens(40, seed=5)
    cache = pair.model.new_cache(num_slots=2, scratch=4, length=60)
    pair.model(torch.tensor(tokens[:12]), plan(cache, pair.model.config.groups, [chain(0, 12)], first_slot=1), cache)
    expected = pair.expected(tokens)
    for position in range(12, 40):
        step = plan(cache, pair.model.config.groups, [chain(position, 1)], first_slot=1)
        hidden = pair.model(torch.tensor([tokens[position]]), step, cache)
        assert_close(pair.model.logits(hidden)[0], expected[position])


def test_sequences_of_different_lengths_share_a_batch(pair: Pair) -> None:
    sequences = [random_tokens(20, seed=6), random_tokens(33, seed=7), random_tokens(17, seed=8)]
    lengths = [5, 18, 2]
    cache = pair.model.new_cache(num_slots=3, scratch=4, length=60)
    prompts = [tokens[:length] for tokens, length in zip(sequences, lengths, strict=True)]
    pair.model(padded(prompts), plan(cache, pair.model.config.groups, [chain(0, length) for length in lengths]), cache)
    expected = [pair.expected(tokens) for tokens in sequences]
    for step in range(15):
        positions = [length + step for length in lengths]
        batch = torch.tensor([tokens[position] for tokens, position in zip(sequences, positions, strict=True)])
        hidden = pair.model(batch, plan(cache, pair.model.config.groups, [chain(position, 1) for position in positions]), cache)
        for index, position in enumerate(positions):
            assert_close(pair.model.logits(hidden)[index], expected[index][position])


#     0            0
#    / \           |
#   1   2          1
#  / \   \        / \
# 3   4   5      2   3
#     |
#     6
TREES = ([-1, 0, 0, 1, 1, 2, 4], [-1, 0, 1, 1])


def test_each_tree_node_sees_its_prefix_and_ancestors_only(pair: Pair) -> None:
    prefixes = [random_tokens(21, seed=9), random_tokens(8, seed=10)]
    nodes = [random_tokens(len(parents), seed=11 + index) for index, parents in enumerate(TREES)]
    cache = pair.model.new_cache(num_slots=2, scratch=7, length=40)
    pair.model(padded(prefixes), plan(cache, pair.model.config.groups, [chain(0, len(prefix)) for prefix in prefixes]), cache)

    trees = [tree(len(prefix), parents, cache.scratch) for prefix, parents in zip(prefixes, TREES, strict=True)]
    logits = pair.model.logits(pair.model(padded(nodes), plan(cache, pair.model.config.groups, trees), cache)).view(2, 7, VOCAB)

    for index, parents in enumerate(TREES):
        for node in range(len(parents)):
            branch = [nodes[index][ancestor] for ancestor in lineage(node, parents)]
            assert_close(logits[index, node], pair.expected([*prefixes[index], *branch])[-1])


def test_decoding_goes_on_from_an_accepted_path(pair: Pair) -> None:
    prefix, nodes, parents = random_tokens(10, seed=20), random_tokens(7, seed=21), TREES[0]
    cache = pair.model.new_cache(num_slots=1, scratch=7, length=40)
    pair.model(torch.tensor(prefix), plan(cache, pair.model.config.groups, [chain(0, 10)]), cache)
    pair.model(torch.tensor(nodes), plan(cache, pair.model.config.groups, [tree(10, parents, cache.scratch)]), cache)

    accepted = lineage(6, parents)
    source = torch.tensor([cache.flat_row(0, node - cache.scratch) for node in accepted])
    destination = torch.tensor([cache.flat_row(0, 10 + depth) for depth in range(len(accepted))])
    cache.move_rows(source, destination)

    tokens = [*prefix, *(nodes[node] for node in accepted), 5, 77]
    hidden = pair.model(torch.tensor(tokens[-2:]), plan(cache, pair.model.config.groups, [chain(len(tokens) - 2, 2)]), cache)
    assert_close(pair.model.logits(hidden), pair.expected(tokens)[-2:])


def test_activations_are_transformers_keys_values_and_layer_inputs(pair: Pair) -> None:
    tokens = torch.tensor([random_tokens(23, seed=30)])
    reference = pair.reference(tokens, use_cache=True, output_hidden_states=True)
    activations = pair.model.encode(tokens, layer_input=2)
    assert activations.layer_input is not None
    assert_close(activations.layer_input, reference.hidden_states[2])
    assert_close(activations.hidden, reference.hidden_states[-1])
    config = pair.model.config
    for layer in range(config.num_layers):
        ours = activations.kv[0, :, layer].view(23, config.num_kv_heads, 2, config.head_dim)
        theirs = reference.past_key_values.layers[layer]
        assert_close(ours[:, :, 0], theirs.keys[0].transpose(0, 1))
        assert_close(ours[:, :, 1], theirs.values[0].transpose(0, 1))


def test_packing_weights_for_inference_keeps_the_logits(tmp_path: Path) -> None:
    Pair("llama", tmp_path)
    model = load_target(tmp_path, dtype=torch.bfloat16)[0]
    tokens = torch.tensor([random_tokens(20, seed=40)])
    before = model.logits(model.encode(tokens).hidden[0])
    optimize_for_inference(model)
    after = model.logits(model.encode(tokens).hidden[0])
    # bfloat16 has 8 bits: two orders of summation differ by some percent of the largest logit.
    torch.testing.assert_close(after, before, atol=0.03 * before.abs().max().item(), rtol=0)


def test_tied_embeddings_are_held_once(tmp_path: Path) -> None:
    model = Pair("qwen2-tied", tmp_path).model
    assert model.lm_head.weight.data_ptr() == model.embedding.weight.data_ptr()
