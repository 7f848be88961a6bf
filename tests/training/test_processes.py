"""Several processes train what one would: the same batches, each row with the same weight, whoever has it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from training.config import TrainConfig
from training.errors import ConfigError
from training.run import prepare

from .finished import log, weights
from .worker import do

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
TWO_PROCESSES = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
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
    "moa, muon": ("train", {"accumulate": 2, "draft_block": 13, "optimizer": "muon"}),
    "pretraining": ("pretrain", {"accumulate": 4, "prompt_weight": 0.3}),
}


ACTIVATIONS: dict[str, dict[str, Any]] = {
    "whole target": {"shard_mb": 1},
    # An odd number of shards: one process has none left, and must still take part in the target's passes.
    "sharded target": {"shard_mb": 1, "shard_target": True, "layers_inferred": 1},
}


def launch(jobs: Sequence[Job], folder: Path) -> None:
    """Do jobs in two processes that talk over gloo."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs, default=str))
    run = subprocess.run(
        [*TWO_PROCESSES, "-m", "tests.training.worker", str(path)],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-4000:]


def halfway(run: Path, out: Path) -> Path:
    """An output folder with what a run had saved at its fourth step, as if it had been cut off then."""
    checkpoint = "checkpoint-00000004.pt"
    (out / "checkpoints").mkdir(parents=True)
    shutil.copy(run / "checkpoints" / checkpoint, out / "checkpoints" / checkpoint)
    return out


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
    common = base | {"max_steps": 8, "lr": 1e-3, "warmup": 2, "schedule": "cosine"}
    common |= {"log_every": 1, "valid_every": 4, "checkpoint_steps": 4}
    jobs: list[Job] = []
    folders: dict[str, tuple[Path, Path]] = {}
    for number, (name, (kind, settings)) in enumerate(RUNS.items()):
        alone, together = (base["out"] / f"{number}-{count}" for count in (1, 2))
        here = common | {"target" if kind == "train" else "base": str(target_folder)} | settings
        do(kind, here | {"out": alone} | ({"shard_target": False} if kind == "train" else {}))
        jobs.append((kind, here | {"out": together}))
        folders[name] = alone, together
    for name, settings in ACTIVATIONS.items():
        alone, together = (base["out"] / f"{name.replace(' ', '-')}-{count}" for count in (1, 2))
        here = base | {"target": str(target_folder), "valid_tokens": 600} | settings
        do("activations", here | {"out": alone, "shard_target": False})
        jobs.append(("activations", here | {"out": together}))
        folders[name] = alone, together
    alone, together = folders["moa"]
    resumed = common | RUNS["moa"][1] | {"target": str(target_folder), "resume": True}
    jobs.append(("train", resumed | {"out": halfway(alone, base["out"] / "ended-by-two")}))
    launch(jobs, base["out"])
    do("train", resumed | {"out": halfway(together, base["out"] / "ended-by-one")})
    for name in ("ended-by-two", "ended-by-one"):
        folders[name] = alone, base["out"] / name
    return folders


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_what_one_does(runs: dict[str, tuple[Path, Path]], name: str):
    alone, together = runs[name]
    one, two = log(alone), log(together)
    assert [line["kind"] for line in one] == ["train"] * 4 + ["valid"] + ["train"] * 4 + ["valid"]
    assert one[-1]["epoch"] > 0, "the run must cross an epoch for this to mean anything"
    for line, other in zip(one, two, strict=True):
        assert line.keys() == other.keys()
        for figure, value in line.items():
            assert other[figure] == pytest.approx(value, abs=2e-5), (figure, line, other)
    # Muon turns matrices' gradients in bfloat16, which rounds the last bit of a sum to one of two neighbours.
    same_weights(alone, together, atol=2e-4 if "muon" in name else 1e-6)


def same_weights(folder: Path, other: Path, atol: float = 1e-6) -> None:
    before, after = weights(folder), weights(other)
    assert before.keys() == after.keys()
    for name in before:
        torch.testing.assert_close(after[name], before[name], atol=atol, rtol=1e-5)


@pytest.mark.parametrize("name", ["ended-by-two", "ended-by-one"])
def test_a_run_goes_on_with_another_number_of_processes(runs: dict[str, tuple[Path, Path]], name: str):
    unbroken, resumed = runs[name]
    assert [line["step"] for line in log(resumed) if line["kind"] == "train"] == [5, 6, 7, 8]
    same_weights(unbroken, resumed)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_two_processes_keep_the_activations_that_one_does(runs: dict[str, tuple[Path, Path]], name: str):
    alone, together = ({path.relative_to(folder): path for path in folder.rglob("*.*") if path.is_file()} for folder in runs[name])
    assert alone.keys() == together.keys()
    assert name != "sharded target" or len([path for path in alone if path.suffix == ".safetensors"]) % 2
    for path, one in alone.items():
        assert together[path].read_bytes() == one.read_bytes(), path


def test_the_documented_command_trains_and_one_process_reports(base: dict[str, Any], target_folder: Path):
    out = base["out"] / "launched"
    launcher = ["--multi_gpu", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--num_processes", "2"]
    limits = ["--max-steps", "2", "--accumulate", "2", "--batch-tokens", "256", "--max-length", "128", "--threads", "1"]
    command = [
        *(
            sys.executable,
            "-m",
            "accelerate.commands.accelerate_cli",
            "launch",
            *launcher,
            "--no_python",
            sys.executable,
            "-m",
            "app.cli",
            "train",
            *limits,
        ),
        *("--target", str(target_folder), "--data", base["data"], "--activations", str(base["out"] / "whole-target-1")),
        *("--out", str(out), "--cache", str(base["cache"]), "--dtype", "float32", "--device", "cpu"),
    ]
    run = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.count("trained drafter in") == 1
    assert run.stdout.count("not evaluated") == 1
    assert json.loads((out / "training.json").read_text())["result"]["step"] == 2


def test_an_update_must_be_divisible(base: dict[str, Any], target_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    config = TrainConfig(**base | {"target": str(target_folder), "max_steps": 1, "accumulate": 3})
    with pytest.raises(ConfigError, match=r"--accumulate 3: .* cannot be divided among 2 processes; say --accumulate 4"):
        prepare(config)


def test_a_target_is_not_sharded_over_one_process(base: dict[str, Any], target_folder: Path):
    config = TrainConfig(**base | {"target": str(target_folder), "max_steps": 1, "shard_target": True})
    with pytest.raises(ConfigError, match="start them with accelerate launch --multi_gpu"):
        prepare(config)
