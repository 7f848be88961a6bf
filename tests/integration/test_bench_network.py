"""`moaserve bench network` with real servers and edges."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from app.cli import cli
from models.eagle import Eagle, EagleConfig
from models.loader import BUNDLED, load_target
from models.saving import save_eagle

pytestmark = pytest.mark.integration


BENCH = ["bench", "network", "--compile", "off", "--transport", "relay"]


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app.cli", *BENCH, *options]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"}, timeout=300)


def random_eagle(folder: Path) -> Path:
    """An EAGLE-2 drafter of the bundled target that has learned nothing."""
    target, _ = load_target(BUNDLED["target"], dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        eagle = Eagle(EagleConfig(target.config, 2, 2, 64))
        for weight in eagle.parameters():
            torch.nn.init.normal_(weight, std=0.02)
    save_eagle(eagle, folder, dtype=torch.float32)
    return folder


def test_every_kind_writes_the_same_over_a_slow_link(tmp_path: Path) -> None:
    # The target itself foretells the target, so all that a small model of its own drafts is accepted.
    drafters = ["--independent", str(BUNDLED["target"]), "--eagle", str(random_eagle(tmp_path / "eagle"))]
    counts = ["--num-prompts", "1", "--rounds", "1", "--max-tokens", "16", "--clients", "2", "--temperature", "1"]
    done = bench("--link", "5g", *counts, *drafters, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Lossless: all 25 texts were those of plain streaming." in done.stdout
    assert "5g, temperature 1: most tokens per second from" in done.stdout
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {
        "speed.png",
        "first-token.png",
        "server-calls.png",
        "bytes.png",
    }
    found: dict[str, dict[str, Any]] = {each["kind"]: each for each in result["figures"]}
    assert list(found) == [each["kind"] for each in result["crowds"]]
    plain, moa, model, eagle = (found[kind] for kind in ("streaming, plain", "edge, MoA", "edge, independent", "edge, EAGLE-2"))
    assert plain["tau"] == 1 and model["tau"] > max(2, eagle["tau"])
    # An answer's first token takes the way there and back, whoever drafts.
    assert all(each["first"]["median"] > 0.02 for each in found.values())
    for each in (moa, model, eagle):
        shares = each["shares"]
        assert shares["server_calls"] > 0 and shares["busy"] > 0
        # What the edge says that it sent and received, and what WebSockets add to it.
        assert 0 < shares["told_up"] < shares["up"] < shares["wire_up"]
        assert 0 < shares["told_down"] < shares["down"] < shares["wire_down"]
    # Of every token, and of the last 128 of a prompt, EAGLE needs 384 numbers, MoA 192, a model of its own none.
    down = [each["shares"]["told_down"] for each in (model, moa, eagle)]
    assert down == sorted(down)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--link", "3g"], "no link '3g': use lan, 5g, 4g, poor"),
        (["--transport", "pigeon"], "--transport must be auto, namespaces or relay, got 'pigeon'"),
        (["--dtype", "int3"], "--dtype"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(options: list[str], message: str) -> None:
    done = CliRunner().invoke(cli, [*BENCH, *options], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and message in done.stderr
