"""Several processes train what one would: the same batches, each row with the same weight, whoever has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from .worker import do

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
TWO_PROCESSES = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
Job = tuple[str, dict[str, Any]]

RUNS: dict[str, Job] = {
    "moa": ("train", {"accumulate": 2}),
    "moa, four batches, N = 1": ("train", {"accumulate": 4, "layers_inferred": 1}),
    "moa, a block, two draws": ("train", {"accumulate": 2, "draft_block": 13, "draws": 2}),
    "moa, sharded target": ("train", {"accumulate": 2, "shard_target": True}),
    "moa, sharded target, N = 1": ("train", {"accumulate": 2, "layers_inferred": 1, "shard_target": True}),
    "eagle3, sharded target": ("train", {"accumulate": 2, "method": "eagle3", "unroll": 3, "shard_target": True}),
    "eagle2": ("train", {"accumulate": 2, "method": "eagle2"}),
    "independent": ("train", {"accumulate": 2, "method": "independent"}),
    "pretraining": ("pretrain", {"accumulate": 4, "prompt_weight": 0.3}),
}


def launch(jobs: Sequence[Job], folder: Path) -> None:
    """Do jobs in two processes that talk over gloo."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs, default=str))
    run = subprocess.run(
        [*TWO_PROCESSES, "-m", "tests.training.worker", str(path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr[-4000:]


@pytest.fixture(scope="module")
def base(target_folder: Path, tmp_path_factory: pytest.TempPathFactory, write_chats: Callable[[Path, int], Path]) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("processes")
    return {
        "data": str(write_chats(folder / "train.jsonl", 40)),
        # Three batches: one process has none left at the end.
        "valid": str(write_chats(folder / "valid.jsonl", 9)),
        "out": folder,
        "cache": folder / "cache",
        "batch_tokens": 256,
        "max_length": 128,
        "dtype": "float32",
        "device": "cpu",
    }


@pytest.fixture(scope="module")
def runs(base: dict[str, Any], target_folder: Path) -> dict[str, tuple[Path, Path]]:
    """The folders of each run by one process and by two."""
    common = base | {"max_steps": 8, "lr": 1e-3, "warmup": 2, "log_every": 1, "valid_every": 4, "schedule": "cosine"}
    jobs: list[Job] = []
    folders: dict[str, tuple[Path, Path]] = {}
    for number, (name, (kind, settings)) in enumerate(RUNS.items()):
        alone, together = (base["out"] / f"{number}-{count}" for count in (1, 2))
        here = common | {"target" if kind == "train" else "base": str(target_folder)} | settings
        do(kind, here | {"out": alone} | ({"shard_target": False} if kind == "train" else {}))
        jobs.append((kind, here | {"out": together}))
        folders[name] = alone, together
    launch(jobs, base["out"])
    return folders


def weights(folder: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(max((folder / "checkpoints").glob("*.pt")), weights_only=True)["model"]
    return state


def log(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    times = ("elapsed", "tokens_per_second", "seconds")
    return [{name: value for name, value in line.items() if name not in times} for line in lines]


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_what_one_does(runs: dict[str, tuple[Path, Path]], name: str):
    alone, together = runs[name]
    one, two = log(alone), log(together)
    assert [line["kind"] for line in one] == ["train"] * 4 + ["valid"] + ["train"] * 4 + ["valid"]
    assert one[-1]["epoch"] > 0, "the run must cross an epoch for this to mean anything"
    for line, other in zip(one, two, strict=True):
        assert line.keys() == other.keys()
        for figure, value in line.items():
            assert other[figure] == pytest.approx(value, abs=2e-4), (figure, line, other)
    before, after = weights(alone), weights(together)
    assert before.keys() == after.keys()
    for weight in before:
        torch.testing.assert_close(after[weight], before[weight], atol=1e-5, rtol=1e-4)
