"""`moaserve train` from chats on disk to a drafter that serves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration


def test_a_drafter_is_trained_evaluated_and_usable(tmp_path: Path) -> None:
    data = tmp_path / "chats.jsonl"
    with data.open("w", encoding="utf-8") as file:
        for number in range(24):
            words = " ".join(f"{number + step}" for step in range(30))
            row = {"messages": [{"role": "user", "content": f"Count from {number}."}, {"role": "assistant", "content": words}]}
            file.write(json.dumps(row) + "\n")
    out = tmp_path / "drafter"
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "app.cli",
            "train",
            "--target",
            "models/pretrained/concierge",
            "--data",
            str(data),
            "--valid",
            str(data),
            "--out",
            str(out),
            "--cache",
            str(tmp_path / "cache"),
            "--max-steps",
            "4",
            "--device",
            "cpu",
            "--threads",
            "1",
            "--batch-tokens",
            "512",
            "--draft-vocabulary",
            "256",
            "--lr",
            "1e-3",
            "--dtype",
            "float32",
        ],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert "trained drafter in" in run.stdout
    told = re.search(r"by the drafter alone: τ (\d\.\d+)", run.stdout.splitlines()[-1])
    assert told and 1 <= float(told[1]) < 1.5  # it has learnt next to nothing; what the text itself foretells is not its own
    assert {"config.json", "model.safetensors", "training.json"} <= {path.name for path in out.iterdir()}
