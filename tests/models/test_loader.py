"""What the loader refuses, and that it says why."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from models.config import DecoderConfig
from models.errors import CheckpointError
from models.loader import eos_token_ids, load_target, load_tokenizer, resolve
from models.rope import RopeConfig

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "tests" / "fixtures" / "llama-n0" / "target"
CONFIG: dict[str, Any] = json.loads((TARGET / "config.json").read_text())


def changed(**changes: Any) -> dict[str, Any]:
    """The fixture's config with changes; a value of ... removes the key."""
    return {key: value for key, value in {**CONFIG, **changes}.items() if value is not ...}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Write a copy of the fixture's target, its config and tensors changed; a tensor of None is left out."""

    def write(config: dict[str, Any] | None = None, **tensors: Tensor | None) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config or CONFIG))
        kept = {**load_file(TARGET / "model.safetensors"), **tensors}
        save_file({name: t for name, t in kept.items() if t is not None}, tmp_path / "model.safetensors")
        return tmp_path

    return write


def refuse(folder: Path | str, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        load_target(folder, dtype=torch.float32)


def test_an_unchanged_checkpoint_is_loaded_without_a_tokenizer(checkpoint: Callable[..., Path]) -> None:
    model, tokenizer = load_target(checkpoint(), dtype=torch.float32)
    assert model.config.num_layers == 4
    assert tokenizer is None


def test_loaded_weights_are_frozen_and_of_the_type_asked_for() -> None:
    model, _ = load_target(TARGET, dtype=torch.bfloat16)
    assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {(torch.bfloat16, False)}


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "MixtralForCausalLM"])
def test_unknown_architectures_are_refused_by_name(checkpoint: Callable[..., Path], name: str) -> None:
    refuse(checkpoint(changed(architectures=[name])), name)


@pytest.mark.parametrize("absent", [..., None, []])
def test_a_config_without_an_architecture_is_read_by_its_model_type(absent: Any) -> None:
    assert DecoderConfig.from_hf(changed(architectures=absent)).architecture == "LlamaForCausalLM"
    assert DecoderConfig.from_hf(changed(architectures=absent, model_type="qwen3")).qk_norm
    for other in (..., "gpt2"):
        with pytest.raises(CheckpointError, match=r"config\.json has no 'architectures'"):
            DecoderConfig.from_hf(changed(architectures=absent, model_type=other))


def test_a_sliding_window_in_use_is_refused(checkpoint: Callable[..., Path]) -> None:
    refuse(checkpoint(changed(architectures=["MistralForCausalLM"], sliding_window=64)), "sliding_window=64")


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_a_sliding_window_that_qwen_uses_is_refused(name: str) -> None:
    sizes = DecoderConfig.from_hf(changed(architectures=[name], sliding_window=64, use_sliding_window=True, max_window_layers=2))
    with pytest.raises(CheckpointError, match="sliding"):
        sizes.check_window()


def test_texts_inside_a_sliding_window_are_computed() -> None:
    sizes = DecoderConfig.from_hf(changed(architectures=["MistralForCausalLM"], sliding_window=64))
    sizes.check_window(64)
    for length in (65, None):
        with pytest.raises(CheckpointError, match="--max-model-len 64"):
            sizes.check_window(length)


def test_sizes_are_written_as_they_are_read() -> None:
    for window in (None, 64):
        sizes = DecoderConfig.from_hf(
            changed(architectures=["MistralForCausalLM"], sliding_window=window, max_position_embeddings=8192)
        )
        assert DecoderConfig.from_hf(sizes.to_hf()) == sizes


@pytest.mark.parametrize(
    "config",
    [
        changed(architectures=["MistralForCausalLM"], sliding_window=None),
        changed(architectures=["MistralForCausalLM"], sliding_window=512),
        changed(architectures=["Qwen2ForCausalLM"], sliding_window=64, use_sliding_window=False),
        changed(architectures=["Qwen2ForCausalLM"], sliding_window=64, use_sliding_window=True, max_window_layers=4),
        changed(sliding_window=64),
    ],
    ids=["null", "as long as the context", "switched off", "in no layer", "of a class that has none"],
)
def test_a_sliding_window_that_changes_nothing_is_accepted(config: dict[str, Any]) -> None:
    DecoderConfig.from_hf(config).check_window()


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_other_rope_scalings_are_refused_by_name(kind: str) -> None:
    with pytest.raises(CheckpointError, match=kind):
        DecoderConfig.from_hf(changed(rope_scaling={"rope_type": kind, "factor": 4.0}))


def test_rope_scaling_is_read_alike_from_transformers_4_and_5() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    old = RopeConfig.from_hf({"rope_theta": 500000.0, "rope_scaling": scaling})
    new = RopeConfig.from_hf({"rope_parameters": {**scaling, "rope_theta": 500000.0}})
    assert old == new == RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)


def test_yarn_reaches_as_far_as_it_says_and_fills_in_what_it_does_not_say() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = DecoderConfig.from_hf(changed(rope_scaling=scaling, max_position_embeddings=32768))
    assert config.max_position_embeddings == 131072
    assert config.rope == RopeConfig(
        config.rope.theta, "yarn", 4.0, original_max_position_embeddings=32768, attention_factor=0.1 * math.log(4) + 1
    )
    assert DecoderConfig.from_hf(config.to_hf()) == config
    longer = changed(rope_scaling=scaling | {"factor": None}, max_position_embeddings=65536)
    assert DecoderConfig.from_hf(longer).rope.factor == 2


def test_a_head_that_turns_in_part_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor=0\.5"):
        DecoderConfig.from_hf(changed(partial_rotary_factor=0.5))


def test_an_older_name_of_the_scaling_type_is_read() -> None:
    assert RopeConfig.from_hf({"rope_scaling": {"type": "linear", "factor": 2.0}}).kind == "linear"


def test_a_scaling_that_was_added_to_a_newer_checkpoint_counts() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": None, "beta_fast": 0}
    given = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": yarn}
    rope = RopeConfig.from_hf(given)
    assert (rope.kind, rope.theta, rope.truncate, rope.beta_fast) == ("yarn", 1e6, False, 32.0)  # as transformers reads null and 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_theta": None}, "of no use: rope_theta is null"),
        ({"rope_scaling": "linear"}, 'of no use: rope_scaling is "linear", and must be an object'),
        ({"vocab_size": "many"}, 'of no use: vocab_size is "many", and must be a whole number'),
        ({"rms_norm_eps": None}, "of no use: rms_norm_eps is null, and must be a number"),
        ({"num_attention_heads": None}, "of no use: num_attention_heads is null"),
        ({"hidden_size": [48]}, r"of no use: hidden_size is \[48\]"),
        ({"num_hidden_layers": 2.5}, "of no use: num_hidden_layers is 2.5"),
        ({"rope_theta": 0}, "rope_theta is 0.0, and must be above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0.0, and must be above 0"),
        ({"rope_scaling": {"type": "linear"}}, "no 'factor'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}, "rope_theta": 1}, "rope_theta is 1.0, and must be above 1"),
        ({"rope_scaling": {"type": "yarn", "factor": "2"}}, 'of no use: factor is "2"'),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": -1}}, "beta_fast is -1.0"),
        ({"rope_scaling": {"type": "llama3", "factor": 8}}, "no 'low_freq_factor'"),
        ({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 1}}, "no 'high_freq_factor'"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor is 4.0, and must be above low_freq_factor",
        ),
        ({"num_attention_heads": 0}, "num_heads is 0"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"num_key_value_heads": 3, "num_attention_heads": 8}, "must divide"),
        ({"head_dim": 15}, "even size"),
        ({"architectures": "GPT2LMHeadModel"}, "architecture 'GPT2LMHeadModel'"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantized weights \(fp8\)"),
    ],
)
def test_configs_of_no_use_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        DecoderConfig.from_hf(changed(**changes))


@pytest.mark.parametrize("part", ["mlp.down_proj", "self_attn.q_proj", "mlp.up_proj"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_weights_are_not_cast(checkpoint: Callable[..., Path], dtype: torch.dtype, part: str) -> None:
    name = f"model.layers.1.{part}.weight"
    folder = checkpoint(**{name: load_file(TARGET / "model.safetensors")[name].to(dtype)})
    refuse(folder, rf"{part}\.weight is stored as {dtype}: quantized weights")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(checkpoint: Callable[..., Path], value: float) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    refuse(checkpoint(**{name: load_file(TARGET / "model.safetensors")[name].fill_(value)}), "not finite")


def test_a_head_of_its_own_is_not_taken_for_the_embedding(checkpoint: Callable[..., Path]) -> None:
    embedding = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"]
    tied = changed(tie_word_embeddings=True)
    refuse(checkpoint(tied, **{"lm_head.weight": embedding + 1}), "tie_word_embeddings")
    assert load_target(checkpoint(tied, **{"lm_head.weight": embedding.clone()}), dtype=torch.float32)


def test_yarn_reaches_past_a_window() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = changed(architectures=["MistralForCausalLM"], sliding_window=64, max_position_embeddings=64)
    DecoderConfig.from_hf(config).check_window()
    with pytest.raises(CheckpointError, match="sliding_window=64"):
        DecoderConfig.from_hf(config | {"rope_scaling": yarn}).check_window()


@pytest.mark.parametrize("told", ["1", [[1, 3]], 1.5])
def test_ends_that_are_no_tokens_are_refused(checkpoint: Callable[..., Path], told: Any) -> None:
    with pytest.raises(CheckpointError, match="eos_token_id"):
        eos_token_ids(checkpoint(changed(eos_token_id=told)))


def test_ends_that_the_model_has_not_are_left_out(checkpoint: Callable[..., Path]) -> None:
    assert eos_token_ids(checkpoint(changed(eos_token_id=[-1, 5, 100_000]))) == {5}


def with_end(folder: Path, end: str | None) -> Path:
    """A tokenizer of three tokens, the last two of which may end texts."""
    tokenizer = Tokenizer(WordLevel({"a": 0, "<|endoftext|>": 1, "<|im_end|>": 2}, unk_token="a"))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_end|>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("end", "expected"), [("<|im_end|>", {1, 2}), ("<|endoftext|>", {1}), (None, {1})])
def test_the_tokenizers_end_ends_texts_besides_the_models(
    checkpoint: Callable[..., Path], end: str | None, expected: set[int]
) -> None:
    folder = with_end(checkpoint(changed(eos_token_id=1)), end)
    assert eos_token_ids(folder) == eos_token_ids(folder, load_tokenizer(folder)) == expected


def test_the_tokenizers_end_is_enough(checkpoint: Callable[..., Path]) -> None:
    assert eos_token_ids(with_end(checkpoint(changed(eos_token_id=...)), "<|im_end|>")) == {2}


def test_an_end_that_the_tokenizer_added_beyond_the_model_is_left_out(checkpoint: Callable[..., Path]) -> None:
    folder = with_end(checkpoint(changed(eos_token_id=1)), "<|im_end|>")
    (folder / "config.json").write_text(json.dumps(changed(eos_token_id=1, vocab_size=2)))
    assert eos_token_ids(folder) == {1}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tokenizer_config.json": "{}"}, "no tokenizer.json"),
        ({"tokenizer.json": "{}"}, "cannot be read"),
        (
            {"tokenizer.json": "no json", "tokenizer_config.json": '{"tokenizer_class": "PreTrainedTokenizerFast"}'},
            "cannot be read",
        ),
        ({"tokenizer.model": "nothing", "tokenizer_config.json": '{"tokenizer_class": "LlamaTokenizer"}'}, "with a tokenizer.json"),
    ],
)
def test_tokenizers_that_cannot_be_read_are_refused(checkpoint: Callable[..., Path], files: dict[str, str], said: str) -> None:
    folder = checkpoint()
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=said):
        load_tokenizer(folder)


def test_other_activations_are_refused(checkpoint: Callable[..., Path]) -> None:
    refuse(checkpoint(changed(hidden_act="gelu")), "gelu")


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "vocab_size"])
def test_a_config_without_a_size_is_refused_by_name(checkpoint: Callable[..., Path], key: str) -> None:
    refuse(checkpoint(changed(**{key: ...})), key)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save(load_file(TARGET / "model.safetensors"), tmp_path / "pytorch_model.bin")
    refuse(tmp_path, "pickle")


def test_pickled_shards_named_by_an_index_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    weights = load_file(TARGET / "model.safetensors")
    torch.save(weights, tmp_path / "pytorch_model.bin")
    index = {"weight_map": dict.fromkeys(weights, "pytorch_model.bin")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(tmp_path, "pickle|safetensors")


@pytest.mark.parametrize("stray", ["training_args.bin", "optimizer.pt"])
def test_what_a_trainer_left_behind_is_not_taken_for_weights(checkpoint: Callable[..., Path], stray: str) -> None:
    folder = checkpoint()
    (folder / stray).write_bytes(b"")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(folder, "has no model-00002-of-00002.safetensors")


@pytest.mark.parametrize(("file", "said"), [("adapter_config.json", "is a LoRA adapter"), ("q4.gguf", "holds a GGUF file")])
def test_other_kinds_of_folders_are_told_as_what_they_are(tmp_path: Path, file: str, said: str) -> None:
    (tmp_path / file).write_text("{}")
    refuse(tmp_path, said)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refuse(tmp_path, said)


def test_files_are_told_from_folders(tmp_path: Path) -> None:
    for name, said in (("model.gguf", "is a GGUF file"), ("model.safetensors", "is a file: name the folder")):
        (tmp_path / name).write_bytes(b"")
        refuse(tmp_path / name, said)


def test_a_home_folder_is_found(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint()
    monkeypatch.setenv("HOME", str(folder.parent))
    assert resolve(f"~/{folder.name}") == folder


def test_a_config_with_a_byte_order_mark_is_read(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8-sig")
    assert load_target(folder, dtype=torch.float32)[0].config.num_layers == 4


def test_a_missing_head_is_told_with_what_may_have_been_forgotten(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(**{"lm_head.weight": None})
    refuse(folder, rf"{folder} has no lm_head\.weight: .*tie_word_embeddings")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path, "config.json")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refuse(tmp_path, "model.safetensors")


@pytest.mark.parametrize("missing", ["./no/such/folder", "no-such-folder", "/no/such/folder"])
def test_a_folder_that_does_not_exist_is_named(missing: str) -> None:
    refuse(missing, missing)


def test_a_broken_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    refuse(tmp_path, "not valid JSON")


def test_a_truncated_weight_file_is_refused_by_name(checkpoint: Callable[..., Path]) -> None:
    weights = checkpoint() / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    refuse(weights.parent, "model.safetensors")


def test_an_index_that_names_an_absent_shard_is_refused(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint()
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(folder, "model-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    "index",
    [{"metadata": {}}, {"weight_map": ["model.safetensors"]}, {"weight_map": {"a": 5}}, {"weight_map": {"a": "../x.safetensors"}}],
)
def test_an_index_without_a_weight_map_is_refused(checkpoint: Callable[..., Path], index: dict[str, object]) -> None:
    folder = checkpoint()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refuse(folder, "weight_map")


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.3.self_attn.k_proj.weight",
        "model.layers.0.input_layernorm.weight",
    ],
)
def test_a_missing_tensor_is_named(checkpoint: Callable[..., Path], name: str) -> None:
    refuse(checkpoint(**{name: None}), name)


@pytest.mark.parametrize(
    ("name", "shape", "part"),
    [
        ("model.embed_tokens.weight", (150, 64), "embedding"),
        ("model.norm.weight", (32,), "norm"),
        ("model.layers.1.mlp.down_proj.weight", (64, 96), r"layers\.1\.mlp\.down"),
        ("model.layers.1.mlp.up_proj.weight", (96, 64), r"layers\.1\.mlp"),
        ("model.layers.2.self_attn.q_proj.weight", (48, 64), r"layers\.2"),
        ("model.layers.2.self_attn.k_proj.weight", (32, 48), r"layers\.2"),
        ("model.layers.2.self_attn.o_proj.weight", (64, 50), r"layers\.2"),
    ],
)
def test_a_misshapen_tensor_is_named(checkpoint: Callable[..., Path], name: str, shape: tuple[int, ...], part: str) -> None:
    refuse(checkpoint(**{name: torch.zeros(shape)}), part)


def test_rotary_buffers_of_old_checkpoints_are_ignored(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(**{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    assert load_target(folder, dtype=torch.float32)[0].config.num_layers == 4


@pytest.mark.parametrize("declared", ["TokenizersBackend", "PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer", None])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_tokenizer_is_what_transformers_takes_it_for(tmp_path: Path, model_type: str, declared: str | None) -> None:
    bundled = ROOT / "models" / "pretrained" / "concierge"
    shutil.copy(bundled / "tokenizer.json", tmp_path)
    settings = {**json.loads((bundled / "tokenizer_config.json").read_text()), "tokenizer_class": declared}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({name: each for name, each in settings.items() if each is not None}))
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "model_type": model_type, "rope_scaling": None}))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert type(ours) is type(theirs)
    assert ours is not None and ours.encode("Grüße, 12 <|im_end|>") == theirs.encode("Grüße, 12 <|im_end|>")


def test_nothing_of_pytorchs_compiler_is_imported() -> None:
    """It takes two seconds of every start."""
    script = """
import sys, torch
from models.loader import load_drafter, load_target
target, tokenizer = load_target("models/pretrained/concierge", dtype=torch.float32)
load_drafter("models/pretrained/concierge-moa", target.config, dtype=torch.float32)
assert tokenizer is not None
sys.exit(", ".join({"torch._dynamo", "torch._inductor", "sympy"} & sys.modules.keys()) or 0)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
