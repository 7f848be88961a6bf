"""`moaserve export-gguf`: what stands in the file, read by the gguf package, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from typer.testing import CliRunner

from app.cli import cli
from models.errors import CheckpointError
from models.gguf_export import ExportedGGUF, export_gguf, llama3_divisors
from models.gguf_tokenizer import CONTROL, NORMAL, USER_DEFINED
from models.loader import BUNDLED, read_tensors
from models.rope import RopeConfig
from tests.models.test_llama_parity import LLAMA3
from tests.speculative.conftest import N0

gguf = pytest.importorskip("gguf", reason="pip install gguf")

Bundled = Callable[[str], tuple[ExportedGGUF, Path]]


def fields(path: Path) -> dict[str, Any]:
    reader = gguf.GGUFReader(path)
    return {name: field.contents() for name, field in reader.fields.items()}


def tensors(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def with_config(folder: Path, **changes: Any) -> Path:
    """The bundled target with another config.json."""
    shutil.copytree(BUNDLED["target"], folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | changes), "utf-8")
    return folder


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Bundled:
    """The bundled target as GGUF of a type, written once."""

    @cache
    def write(dtype: Any) -> tuple[ExportedGGUF, Path]:
        path = tmp_path_factory.mktemp("gguf") / "new" / "t.gguf"
        return export_gguf("bundled", path, dtype=dtype), path

    return write


def test_sizes_and_tokenizer_of_the_bundled_target_are_told(bundled: Bundled) -> None:
    done, path = bundled("bfloat16")
    found = fields(path)
    assert (done.architecture, done.pre_tokenizer, done.num_tensors) == ("llama", "dbrx", 2 + 12 * 9)
    expected = {
        "general.architecture": "llama",
        "general.name": "concierge",
        "general.file_type": 32,  # mostly bfloat16
        "llama.vocab_size": 8192,
        "llama.context_length": 2048,
        "llama.embedding_length": 288,
        "llama.block_count": 12,
        "llama.feed_forward_length": 768,
        "llama.attention.head_count": 6,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 48,
        "llama.attention.value_length": 48,
        "llama.rope.dimension_count": 48,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": (BUNDLED["target"] / "chat_template.jinja").read_text("utf-8"),
    }
    assert {name: found.get(name) for name in expected} == expected
    assert found["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert "llama.rope.scaling.type" not in found and "tokenizer.ggml.eot_token_id" not in found


def test_tokens_types_and_merges_are_those_of_the_tokenizer(bundled: Bundled) -> None:
    found = fields(bundled("bfloat16")[1])
    tokenizer = Tokenizer.from_file(str(BUNDLED["target"] / "tokenizer.json"))
    assert found["tokenizer.ggml.tokens"] == [tokenizer.id_to_token(number) for number in range(8192)]
    assert found["tokenizer.ggml.token_type"] == [CONTROL] * 3 + [USER_DEFINED] * 2 + [NORMAL] * 8187
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    assert [merge.split(" ") for merge in found["tokenizer.ggml.merges"]] == merges


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")])
def test_matrices_have_the_type_asked_for_and_vectors_float32(dtype: str, kind: str, bundled: Bundled) -> None:
    found, original = tensors(bundled(dtype)[1]), read_tensors(BUNDLED["target"])
    assert {tensor.tensor_type.name for name, tensor in found.items() if "norm" not in name} == {kind}
    assert {tensor.tensor_type.name for name, tensor in found.items() if "norm" in name} == {"F32"}
    values = torch.from_numpy(
        gguf.quants.dequantize(found["blk.3.ffn_down.weight"].data, found["blk.3.ffn_down.weight"].tensor_type).copy()
    )
    expected = original["model.layers.3.mlp.down_proj.weight"].to(getattr(torch, dtype)).float()
    assert torch.equal(values, expected)
    norm = torch.from_numpy(found["output_norm.weight"].data.copy())
    assert torch.equal(norm, original["model.norm.weight"].float())
    assert "output.weight" not in found  # tied


def test_queries_and_keys_of_llama_turn_in_neighbouring_pairs(bundled: Bundled) -> None:
    """Pair i of a head, rows i and i + d/2 of the checkpoint, are rows 2i and 2i + 1 of the file."""
    found, original = tensors(bundled("float32")[1]), read_tensors(BUNDLED["target"])
    for theirs, ours, heads in (("q_proj", "attn_q", 6), ("k_proj", "attn_k", 2)):
        before = original[f"model.layers.5.self_attn.{theirs}.weight"].float()
        after = torch.from_numpy(found[f"blk.5.{ours}.weight"].data.copy())
        for head in range(heads):
            for pair in (0, 1, 23):
                assert torch.equal(after[48 * head + 2 * pair], before[48 * head + pair])
                assert torch.equal(after[48 * head + 2 * pair + 1], before[48 * head + pair + 24])
    values = torch.from_numpy(found["blk.5.attn_v.weight"].data.copy())
    assert torch.equal(values, original["model.layers.5.self_attn.v_proj.weight"].float())


def test_llama3_scaling_divides_frequencies_as_transformers_does() -> None:
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=LLAMA3), "cpu")
    plain = 100.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    ours = llama3_divisors(RopeConfig.from_hf({"rope_parameters": LLAMA3}), 16)
    torch.testing.assert_close(plain.float() / ours, scaled)
    assert ours.min() == 1 and ours.max() == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "architecture 'GemmaForCausalLM' is not supported"),
        ({"architectures": ["Qwen3ForCausalLM"], "attention_bias": True}, "qwen3 has not what this Qwen3ForCausalLM has: a bias"),
        ({"architectures": ["Qwen3ForCausalLM"], "rope_parameters": LLAMA3}, "rope type 'llama3'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"intermediate_size": 700}, "has shape (768, 288), the config asks for (700, 288)"),
        ({"num_hidden_layers": 13}, "the checkpoint has no tensor 'model.layers.12.input_layernorm.weight'"),
        ({"vocab_size": 100}, "the model has 100 tokens"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_exported_are_refused_and_leave_nothing(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = with_config(tmp_path / "model", **changes)
    result = CliRunner().invoke(cli, ["export-gguf", "--model", str(model), "--out", str(tmp_path / "out" / "t.gguf")])
    assert result.exit_code == 1 and message in result.stderr, result.output
    assert result.stderr.startswith("moaserve: error: ") and result.stderr.count("\n") == 1
    assert not list(tmp_path.glob("out/*"))


def test_the_command_says_what_it_wrote_and_replaces_only_where_that_is_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "t.gguf"
    arguments = ["export-gguf", "--out", str(out)]
    result = CliRunner().invoke(cli, [*arguments, "--dtype", "float32"])
    said = (
        f"concierge for llama.cpp, float32, architecture llama, pre-tokenizer dbrx, 110 tensors, {out.stat().st_size / 1e6:.2f} MB"
    )
    assert result.exit_code == 0 and said in result.stdout, result.output
    again = CliRunner().invoke(cli, arguments)
    assert again.exit_code == 1 and f"--out {out} is there already: --force replaces it" in again.stderr
    assert fields(out)["general.file_type"] == 0
    assert CliRunner().invoke(cli, [*arguments, "--force"]).exit_code == 0
    assert fields(out)["general.file_type"] == 32
    assert [file.name for file in tmp_path.iterdir()] == ["t.gguf"]


def test_a_model_without_a_tokenizer_and_a_folder_as_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        export_gguf(str(N0 / "target"), tmp_path / "t.gguf")
    with pytest.raises(CheckpointError, match="is a folder: name a file"):
        export_gguf("bundled", tmp_path)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    result = CliRunner().invoke(cli, ["export-gguf", "--out", str(tmp_path / "t.gguf")])
    assert result.exit_code == 1 and "no gguf: pip install gguf" in result.stderr
    assert not list(tmp_path.iterdir())
