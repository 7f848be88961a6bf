"""Activations on disk: what is read is what the target made, and training from it is training beside the target."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from models.loader import load_target
from training.activations import writing
from training.activations.command import app
from training.activations.config import ActivationsConfig
from training.activations.index import Facts
from training.activations.reading import open_activations
from training.activations.run import make
from training.config import TrainConfig
from training.errors import ConfigError, DataError, TrainingInterrupted
from training.run import train

from .finished import log, weights

Chats = Callable[[Path, int], Path]


@pytest.fixture
def config(target_folder: Path, tmp_path: Path, write_chats: Chats) -> ActivationsConfig:
    return ActivationsConfig(
        target=str(target_folder),
        data=str(write_chats(tmp_path / "train.jsonl", 40)),
        valid=str(write_chats(tmp_path / "valid.jsonl", 12)),
        out=tmp_path / "activations",
        cache=tmp_path / "cache",
        batch_tokens=256,
        valid_tokens=600,
        max_length=128,
        dtype="float32",
        device="cpu",
        shard_mb=1,
    )


def training(config: ActivationsConfig, out: Path, **settings: Any) -> TrainConfig:
    """A run beside the target, with the text and batches of ``config``."""
    return TrainConfig(
        **{
            "target": config.target,
            "data": config.data,
            "valid": config.valid,
            "out": out,
            "cache": config.cache,
            "batch_tokens": config.batch_tokens,
            "valid_tokens": config.valid_tokens,
            "max_length": config.max_length,
            "dtype": "float32",
            "device": "cpu",
            "lr": 1e-3,
            "max_steps": 10,
            "log_every": 1,
            "valid_every": 5,
        }
        | settings
    )


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}


KINDS = [
    {},
    {"layers_inferred": 1},
    {"method": "eagle2"},
    {"method": "eagle3", "unroll": 3},
    {"method": "independent"},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_in_float32_training_from_disk_is_training_beside_the_target(
    config: ActivationsConfig, tmp_path: Path, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    kept = {name: value for name, value in kind.items() if name in ("method", "layers_inferred")}
    make(dataclasses.replace(config, **kept))
    beside = training(config, tmp_path / "beside", **kind)
    train(beside)
    monkeypatch.setattr("models.llama.Llama.encode", lambda *_, **__: pytest.fail("the target was run"))
    apart = dataclasses.replace(beside, out=tmp_path / "apart", data=None, valid=None, activations=config.out)
    train(apart)
    assert log(apart.out) == log(beside.out)
    assert [line["kind"] for line in log(apart.out)].count("valid") == 2
    assert max(line["epoch"] for line in log(apart.out)) > 0, "beyond the first epoch batches are others than those of the target"
    one, other = weights(beside.out), weights(apart.out)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_is_read_is_what_the_target_makes_of_a_conversation(config: ActivationsConfig, target_folder: Path):
    make(dataclasses.replace(config, layers_inferred=2))
    target, _ = load_target(target_folder, dtype=torch.float32)
    facts = Facts.read(config.out / "train")
    corpus = open_activations(config.out / "train", target.config, facts.target, 100, torch.float32)
    assert corpus.activations is not None
    rows = [corpus.row(index, 100)[0] for index in (31, 4)]
    read = corpus.activations.read(np.array([31, 4]), [len(row) for row in rows], 112)
    for row, ids in enumerate(rows):
        truth = target.encode(torch.from_numpy(ids.astype(np.int64))[None], layer_input=2)
        for part in ("kv", "hidden", "layer_input"):
            got, expected = getattr(read, part)[row], getattr(truth, part)[0]
            torch.testing.assert_close(got[: len(ids)], expected)
            assert not got[len(ids) :].any()
    assert read.kv.shape == (2, 112, 4, target.config.kv_size)


def test_bfloat16_takes_half_the_room_and_trains(config: ActivationsConfig, tmp_path: Path):
    make(dataclasses.replace(config, dtype="bfloat16", out=tmp_path / "half"))
    make(config)
    shard = load_file(tmp_path / "half" / "train" / "shard-00000.safetensors")
    assert {name: x.dtype for name, x in shard.items()} == dict.fromkeys(("hidden", "kv"), torch.bfloat16)
    size = {folder: sum(map(len, files(folder).values())) for folder in (config.out, tmp_path / "half")}
    assert size[tmp_path / "half"] < 0.6 * size[config.out]
    run = training(config, tmp_path / "run", data=None, valid=None, activations=tmp_path / "half", dtype="bfloat16", max_steps=30)
    train(run)
    losses = [line["loss"] for line in log(run.out) if line["kind"] == "train"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("tiles", [True, False])
def test_where_float32_is_faster_the_target_computes_in_it_and_what_is_kept_is_rounded(
    config: ActivationsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiles: bool
):
    monkeypatch.setattr("models.tiles.has_tiles", lambda: tiles)
    shards = []
    for dtype in ("float32", "bfloat16"):
        out = make(dataclasses.replace(config, dtype=dtype, shard_mb=512, out=tmp_path / dtype))
        shards.append(load_file(out / "train" / "shard-00000.safetensors"))
    exact, kept = shards
    assert all(torch.equal(kept[name], exact[name].bfloat16()) for name in exact) == (not tiles)


def test_a_run_that_is_cut_off_goes_on_at_the_last_whole_shard(
    config: ActivationsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    whole = dataclasses.replace(config, out=tmp_path / "whole")
    make(whole)
    shards = sorted(path.name for path in (whole.out / "train").glob("shard-*"))
    assert len(shards) >= 3
    saved = writing.save_file

    def cut_off(parts: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        saved(parts, path, metadata)
        if "shard-00001" in path.name:
            raise KeyboardInterrupt

    monkeypatch.setattr(writing, "save_file", cut_off)
    with pytest.raises(TrainingInterrupted, match="the same command goes on at the last whole shard"):
        make(config)
    monkeypatch.undo()
    assert [path.name for path in (config.out / "train").glob("shard-*.safetensors")] == ["shard-00000.safetensors"]
    assert len(list((config.out / "train").glob("*.tmp"))) == 1
    with pytest.raises(ConfigError, match=rf"lacks {len(shards) - 1} of {len(shards)} shards: run the same moaserve activations"):
        train(training(config, tmp_path / "early", data=None, valid=None, activations=config.out))
    first = (config.out / "train" / "shard-00000.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    make(config)
    assert f"in {len(shards)} shards, 1 of them there" in capsys.readouterr().out
    assert (config.out / "train" / "shard-00000.safetensors").stat().st_mtime_ns == first
    assert files(config.out) == files(whole.out)
    assert not list(config.out.rglob("*.tmp"))


@pytest.mark.parametrize("size", [0, 100, -1])
def test_a_damaged_plan_or_text_is_named_and_made_anew_by_the_same_command(config: ActivationsConfig, tmp_path: Path, size: int):
    make(config)
    shards, folder = files(config.out), config.out / "train"
    run = training(config, tmp_path / "run", data=None, valid=None, activations=config.out, max_steps=1)
    cure = "run the same moaserve activations again, which writes it anew"
    text = folder / Facts.read(folder).corpus / "tokens.npy"
    for path, error, complaint in (
        (folder / "plan.npz", ConfigError, rf"{folder}/plan\.npz is damaged \(.*\): {cure}"),
        (text, DataError, f"the tokenised text in {text.parent} is damaged: .*: {cure}"),
    ):
        whole, mode = path.read_bytes(), path.parent.stat().st_mode
        path.write_bytes(whole[:size])
        with pytest.raises(error, match=complaint):
            train(run)
        make(config)
        assert (path.read_bytes(), path.parent.stat().st_mode) == (whole, mode)
    assert files(config.out) == shards
    train(run)


def test_a_damaged_index_says_what_to_do_and_costs_no_shard(config: ActivationsConfig, tmp_path: Path):
    make(config)
    index = config.out / "train" / "index.json"
    whole, before = index.read_text(), {path: path.stat().st_mtime_ns for path in config.out.rglob("shard-*")}
    run = training(config, tmp_path / "run", data=None, valid=None, activations=config.out, max_steps=1)
    cure = r"index\.json is no index of activations \(.*\): delete it, and run the same moaserve activations again"
    for damaged in ("", whole[:100], "[]"):
        index.write_text(damaged)
        for use in (lambda: train(run), lambda: make(config)):
            with pytest.raises(ConfigError, match=cure):
                use()
    index.unlink()
    with pytest.raises(ConfigError, match=r"shard-00000\.safetensors is of other activations than these\. Choose another --out"):
        make(dataclasses.replace(config, max_length=64))
    assert not index.exists()
    make(config)
    assert index.read_text() == whole
    assert {path: path.stat().st_mtime_ns for path in config.out.rglob("shard-*")} == before


def test_the_size_is_said_first_and_must_fit_the_disk(
    config: ActivationsConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    usage = writing.shutil.disk_usage(config.out.parent)
    monkeypatch.setattr(writing.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ConfigError, match=r"has 0\.00 GB free, and 0\.0\d GB are to be written"):
        make(config)
    assert not files(config.out)
    monkeypatch.undo()
    make(config)
    line = capsys.readouterr().out.splitlines()[0]
    target, _ = load_target(config.target, dtype=torch.float32)
    c = target.config
    each = 4 * (c.hidden_size + c.num_layers * 2 * c.num_kv_heads * c.head_dim)
    assert "40 conversations, " in line and f"tokens of {each:,} bytes" in line
    rows = sum(len(load_file(path)["hidden"]) for path in (config.out / "train").glob("shard-*"))
    assert f"{rows:,} tokens" in line


def test_what_does_not_fit_is_refused(config: ActivationsConfig, tmp_path: Path, write_chats: Chats, target_folder: Path):
    make(config)
    with pytest.raises(ConfigError, match=r"holds other activations: max_length was 128 and is now 64"):
        make(dataclasses.replace(config, max_length=64))
    other = str(write_chats(tmp_path / "other.jsonl", 7))

    def refused(complaint: str, **settings: Any) -> None:
        with pytest.raises(ConfigError, match=complaint):
            train(training(config, tmp_path / "run", **{"data": None, "valid": None, "activations": config.out, **settings}))

    refused("--data .* is not what the activations in .* were made of", data=other)
    refused("--valid .* is not what the activations in .* were made of", valid=other)
    refused("lack the outputs of layers 2, 2, 4: make others", method="eagle3")
    refused("lack the input of layer 3: make others, with the --method and the --layers-inferred", layers_inferred=1)
    refused("holds no activations", activations=tmp_path)
    refused("holds no activations", activations=Path(config.data or ""))
    refused("--regenerate takes the target itself", regenerate=3)
    refused("there is nothing to shard", shard_target=True)
    refused("say what to train on", activations=None)
    another = tmp_path / "target"
    _changed_copy(target_folder, another)
    refused("are another target's", target=str(another))
    train(training(config, tmp_path / "told", activations=config.out, max_steps=1))


def _changed_copy(folder: Path, copy: Path) -> None:
    """The same target but for its norms."""
    copy.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            save_file({name: x * 1.5 if "norm" in name else x for name, x in tensors.items()}, copy / path.name)
        else:
            (copy / path.name).write_bytes(path.read_bytes())


def test_what_cannot_be_made_is_refused_before_the_text_is_read(
    config: ActivationsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("training.activations.run.corpora", lambda *_: pytest.fail("it was read"))
    with pytest.raises(ConfigError, match="--layers-inferred 4: of this target's 4 layers at most 3 can be borrowed"):
        make(dataclasses.replace(config, layers_inferred=4))
    (tmp_path / "file").touch()
    for name in ("out", "cache"):
        with pytest.raises(ConfigError, match=rf"--{name} .*: {tmp_path}/file is no folder"):
            make(dataclasses.replace(config, **{name: tmp_path / "file"}))


def test_regenerated_answers_come_with_their_activations(config: ActivationsConfig, tmp_path: Path):
    make(dataclasses.replace(config, regenerate=10, valid=None))
    facts = Facts.read(config.out / "train")
    assert facts.corpus != facts.data
    apart = training(config, tmp_path / "apart", valid=None, activations=config.out, max_steps=3)
    train(apart)
    beside = training(config, tmp_path / "beside", valid=None, regenerate=10, max_steps=3)
    train(beside)
    assert log(apart.out) == log(beside.out)


def test_the_command_makes_them_and_train_takes_them(config: ActivationsConfig, tmp_path: Path):
    shared = (
        f"--target {config.target} --batch-tokens 256 --max-length 128 --dtype float32 --device cpu --cache {config.cache}".split()
    )
    made = CliRunner().invoke(app, [*shared, "--data", str(config.data), "--out", str(config.out)])
    assert made.exit_code == 0, made.output
    assert f"activations in {config.out}" in made.output
    wrong = CliRunner().invoke(app, [*shared, "--data", str(config.data), "--out", str(config.out), "--method", "eagle2"])
    assert wrong.exit_code == 2
    assert "moaserve activations:" in wrong.output and "Choose another --out" in wrong.output
