"""`moaserve train` as a user meets it."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from app.cli import cli
from training.command import app
from training.errors import ConfigError, TrainingInterrupted
from training.options import run, settings


def test_help_teaches_the_options_and_the_papers_values(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = CliRunner().invoke(app, ["--help"]).stdout
    options = """
        target data out lsa-kv-heads lsa-mlp sa-kv-heads sa-mlp ca-kv-heads ca-mlp layers-inferred kl-weight feature-weight
        min-interval max-interval staircase-until lr warmup schedule batch-tokens max-length dtype seed threads resume epochs
        max-steps max-minutes
    """
    assert [name for name in options.split() if f"--{name}" not in text] == []
    assert text.count("paper") >= 15


@pytest.mark.parametrize(
    ("device", "gpu", "tiles", "expected"),
    [
        ("auto", True, False, "bfloat16"),
        ("cuda", True, False, "bfloat16"),
        ("cpu", True, False, "float32"),
        ("auto", False, True, "bfloat16"),
        ("auto", False, False, "float32"),
    ],
)
def test_what_computes_fastest_is_taken_unless_another_type_is_named(
    monkeypatch: pytest.MonkeyPatch, device: str, gpu: bool, tiles: bool, expected: str
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr("models.tiles.has_tiles", lambda: tiles)
    assert settings({"device": device, "dtype": "auto"})["dtype"] == expected
    assert settings({"device": device, "dtype": "bfloat16"})["dtype"] == "bfloat16"


def test_the_command_trains_and_reports_mistakes_in_a_line(
    target_folder: Path, tmp_path: Path, write_chats: Callable[[Path, int], Path]
):
    data, out = write_chats(tmp_path / "train.jsonl", 10), tmp_path / "out"
    options = f"--target {target_folder} --data {data} --out {out} --cache {tmp_path / 'cache'} --max-length 128 --batch-tokens 256"
    options += " --dtype float32 --device cpu --sa-mlp 48"
    done = CliRunner().invoke(app, [*options.split(), "--max-steps", "2"])
    assert done.exit_code == 0, done.output
    assert json.loads((out / "config.json").read_text())["self_attention_intermediate_size"] == 48
    again = CliRunner().invoke(app, [*options.split(), "--max-steps", "2"])
    assert again.exit_code == 2
    assert "add --resume" in again.output
    (tmp_path / "bad.jsonl").write_text("{")
    misled = options.replace(str(data), str(tmp_path / "bad.jsonl")).replace(str(out), str(tmp_path / "other"))
    bad = CliRunner().invoke(app, [*misled.split(), "--max-steps", "2"])
    assert bad.exit_code == 2
    assert "bad.jsonl:1: not JSON" in bad.output


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("--lr: no"), 2, "moaserve train: --lr: no\n"),
        (
            OSError(28, "No space left on device", "log.jsonl"),
            2,
            "moaserve train: [Errno 28] No space left on device: 'log.jsonl'\n",
        ),
        (TrainingInterrupted("stopped"), 128 + signal.SIGINT, "stopped\n"),
        (TrainingInterrupted("stopped", signal.SIGTERM), 128 + signal.SIGTERM, "stopped\n"),
    ],
    ids=str,
)
def test_what_ends_a_run_is_a_line_and_an_exit_code(error: Exception, code: int, line: str, capsys: pytest.CaptureFixture[str]):
    def work() -> Path:
        raise error

    with pytest.raises(typer.Exit) as ended:
        run("train", work)
    assert (ended.value.exit_code, capsys.readouterr().err) == (code, line)


@pytest.mark.parametrize(
    "command",
    [
        "train --target bundled --data chats.jsonl --max-steps 1",
        "pretrain --data chats.jsonl --max-steps 1",
        "activations --target bundled --data chats.jsonl",
        "export-edge",
        "export-gguf",
    ],
)
@pytest.mark.parametrize("out", ["", " "])
def test_an_empty_out_is_not_the_working_directory(command: str, out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, [*command.split(), "--out", out])
    assert done.exit_code == 2
    assert "Invalid value for '--out': it is empty: say where to write" in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["train --target x", "pretrain --base x", "activations --target x"])
def test_without_the_trainers_packages_it_says_what_to_install(command: str, tmp_path: Path):
    """In a process of its own, where nothing has been imported yet."""
    program = "import sys; sys.modules['accelerate'] = None; from app.cli import cli; cli()"
    options = [*command.split(), "--data", "chats.jsonl", "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", program, *options], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "pip install 'moaserve[train]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
