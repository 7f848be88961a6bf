"""`moaserve export-edge`: what it writes, what it says, and what it refuses."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from app.cli import cli
from models.edge_bundle import read_bundle
from models.loader import BUNDLED
from models.saving import save_eagle
from tests.speculative.conftest import N0, N1, random_eagle

runner = CliRunner()
PAIR = ["--model", str(N0 / "target"), "--drafter", str(N0 / "drafter")]


def test_a_pair_is_exported(tmp_path: Path) -> None:
    out = tmp_path / "new" / "edge"
    result = runner.invoke(cli, ["export-edge", *PAIR, "--dtype", "float16", "--quantization", "int8", "--out", str(out)])
    assert result.exit_code == 0, result.output
    config = read_bundle(out, dtype=torch.float32).config
    assert (config.dtype, config.quantization) == ("float16", "int8")
    said = result.stdout
    assert f"{out}: target and its drafter for an edge, int8 (the rest float16), pair {config.fingerprint}" in said
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    assert f"{size / 1e6:.2f} MB in 1 file" in said and re.search(r"target 0\.68 MB, drafter 0\.39 MB", said)


def test_the_bundled_pair_is_the_default(tmp_path: Path) -> None:
    result = runner.invoke(cli, ["export-edge", "--out", str(tmp_path / "edge")])
    assert result.exit_code == 0, result.output
    bundle = read_bundle(tmp_path / "edge", dtype=torch.bfloat16)
    assert (bundle.config.name, bundle.config.dtype, bundle.config.quantization) == ("concierge", "bfloat16", None)
    assert bundle.tokenizer is not None and bundle.tokenizer.chat_template
    assert bundle.generation == {"do_sample": True, "eos_token_id": 2, "pad_token_id": 0, "temperature": 0.7, "top_p": 0.95}


def test_a_bundle_is_replaced_only_where_that_is_asked_for(tmp_path: Path) -> None:
    arguments = ["export-edge", *PAIR, "--out", str(tmp_path)]
    assert runner.invoke(cli, arguments).exit_code == 0
    (tmp_path / "notes.txt").touch()
    before = (tmp_path / "config.json").read_text()
    again = runner.invoke(cli, [*arguments, "--dtype", "float32"])
    assert again.exit_code == 1 and f"--out {tmp_path} holds a bundle already: --force replaces it" in again.stderr
    assert (tmp_path / "config.json").read_text() == before
    assert runner.invoke(cli, [*arguments, "--dtype", "float32", "--force"]).exit_code == 0
    assert read_bundle(tmp_path, dtype=torch.float32).config.dtype == "float32"
    assert (tmp_path / "notes.txt").exists()


def test_a_full_disk_is_told_in_a_line(tmp_path: Path) -> None:
    earlier = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, earlier[1]))
    try:
        result = runner.invoke(cli, ["export-edge", *PAIR, "--out", str(tmp_path / "edge")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, earlier)
    assert result.exit_code == 1 and result.stderr.startswith(f"moaserve: error: cannot export to --out {tmp_path / 'edge'}: ")
    assert result.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_other_folders_are_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "photo.png").touch()
    for force in ([], ["--force"]):
        result = runner.invoke(cli, ["export-edge", *PAIR, "--out", str(tmp_path), *force])
        assert result.exit_code == 1 and f"--out {tmp_path} is not empty and holds no bundle" in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["photo.png"]
    result = runner.invoke(cli, ["export-edge", *PAIR, "--out", str(tmp_path / "photo.png")])
    assert result.exit_code == 1 and "photo.png is a file: name a folder" in result.stderr


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle")
    save_eagle(random_eagle(2), folder)
    return folder


@pytest.mark.parametrize(
    ("model", "drafter", "message"),
    [
        (N0 / "target", "ngram", "--drafter ngram: this drafts without a network"),
        (N0 / "target", "none", "--drafter none: "),
        (N1 / "target", N1 / "drafter", "runs through the target's last 1 layers (target_layer_inference), which stay"),
        (BUNDLED["target"], BUNDLED["target"], "is a model of its own, which knows nothing of the target and needs no bundle"),
        (N0 / "target", "eagle", "is an EAGLE drafter, which reads the target's hidden states"),
    ],
)  # fmt: skip
def test_drafters_that_cannot_draft_on_an_edge_are_refused(
    model: Path, drafter: Path | str, message: str, eagle: Path, tmp_path: Path
) -> None:
    name = str(eagle if drafter == "eagle" else drafter)
    result = runner.invoke(cli, ["export-edge", "--model", str(model), "--drafter", name, "--out", str(tmp_path / "edge")])
    assert result.exit_code == 1
    assert result.stderr.startswith("moaserve: error: --drafter") and result.stderr.count("\n") == 1
    assert message in result.stderr and "only Mixture-of-Attentions drafters with N = 0 can be exported" in result.stderr
    assert not (tmp_path / "edge").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--model", str(N0 / "target")], 2, "--drafter: name the one for --model"),
        (["--model", "/nowhere", "--drafter", "bundled"], 1, "no folder '/nowhere'"),
        (["--model", str(N0 / "target"), "--drafter", "bundled"], 1, "was made for a target with hidden_size=288, this one has 64"),
        (["--dtype", "int8"], 2, "--dtype"),
        (["--quantization", "int4"], 2, "--quantization"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], code: int, message: str, tmp_path: Path) -> None:
    result = runner.invoke(cli, ["export-edge", *arguments, "--out", str(tmp_path / "edge")], env={"TERMINAL_WIDTH": "200"})
    assert (result.exit_code, message in result.stderr) == (code, True), result.output
    assert "Traceback" not in result.output and not (tmp_path / "edge").exists()
