"""`moaserve bench peers` with our real server, transformers, and llama.cpp where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from models.loader import BUNDLED

pytestmark = pytest.mark.integration
COUNTS = ["--num-prompts", "2", "--max-tokens", "16", "--max-prompt-tokens", "200", "--num-threads", "1"]


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app.cli", "bench", "peers", "--compile", "off", "--dtype", "float32", *COUNTS, *options]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"}, timeout=300)


def by_way(folder: Path, at_once: int) -> dict[str, dict[str, Any]]:
    found = json.loads((folder / "results.json").read_text())["figures"]
    return {each["way"]: each for each in found if each["concurrency"] == at_once}


def test_all_of_transformers_ways_write_what_we_write(tmp_path: Path) -> None:
    kinds = ("ours-plain", "transformers", "transformers-lookup", "transformers-assisted")
    # The target itself foretells the target, so drafts are accepted in assisted generation.
    done = bench(
        *(part for kind in kinds for part in ("--peer", kind)),
        *("--concurrency", "1", "--concurrency", "2", "--lookup-tokens", "4"),
        *("--independent", str(BUNDLED["target"]), "--out", str(tmp_path)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    alone, together = by_way(tmp_path, 1), by_way(tmp_path, 2)
    assert list(alone) == ["ours", "ours-plain", "transformers", "transformers-lookup (4)", "transformers-assisted"]
    assert list(together) == ["ours", "ours-plain", "transformers"]
    assert all((each["identical"], each["texts"]) == (2, 2) for each in [*alone.values(), *together.values()])
    assert all(each["ours_over"]["median"] > 0 and each["tokens_per_second"] > 0 for each in alone.values())
    result = json.loads((tmp_path / "results.json").read_text())
    tokens = {(run["concurrency"], run["way"]): 0 for run in result["runs"]}
    for run in result["runs"]:
        tokens[run["concurrency"], run["way"]] += run["tokens"]
    assert len(set(tokens.values())) == 1  # however an answer's end is counted
    assert result["settings"]["dtype"] == "float32" and result["settings"]["threads"] == 1
    assert result["settings"]["peers"]["transformers_attention"] == "sdpa"
    assert (tmp_path / "peers.png").exists()
    assert "transformers drafts for one sequence at a time" in done.stdout


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="pip install 'moaserve[peers]'")
def test_llama_cpps_server_writes_what_we_write(tmp_path: Path) -> None:
    done = bench(
        *("--peer", "llama.cpp", "--peer", "llama.cpp-lookup", "--lookup-tokens", "4"),
        *("--concurrency", "1", "--concurrency", "2", "--out", str(tmp_path)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for at_once in (1, 2):
        found = by_way(tmp_path, at_once)
        assert list(found) == ["ours", "llama.cpp", "llama.cpp-lookup (4)"]
        assert all((each["identical"], each["texts"]) == (2, 2) for each in found.values())
    result = json.loads((tmp_path / "results.json").read_text())
    assert "AVX" in result["settings"]["peers"]["llama_cpp_built_with"] or os.uname().machine != "x86_64"
    assert len({(run["group"], run["tokens"]) for run in result["runs"] if run["concurrency"] == 1}) == 2


def test_a_server_that_does_not_start_is_told(tmp_path: Path) -> None:
    done = bench("--peer", "transformers", "--concurrency", "1", "--drafter", str(tmp_path))
    assert done.returncode == 1 and "ended with 1 instead of starting" in done.stderr
    assert "Traceback" not in done.stderr
