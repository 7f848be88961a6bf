"""The loop: it learns, it stops when told, and a resumed run ends where an unbroken one does, to the bit."""

import dataclasses
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.errors import CheckpointError
from models.loader import BUNDLED, load_drafter
from models.target_weights import weights_name
from speculative.config import EngineConfig
from speculative.loading import load_engine
from speculative.request import Request, SamplingParams
from training.checkpoints import Position, save_checkpoint
from training.config import TrainConfig
from training.errors import ConfigError, DataError, TrainingError, TrainingInterrupted
from training.export import export
from training.run import prepare, train
from training.tasks.moa import MoATask
from training.trainer import Trainer, rate_factor

from .finished import weights


@pytest.fixture
def config(target_folder: Path, tmp_path: Path, write_chats: Callable[[Path, int], Path]) -> TrainConfig:
    return TrainConfig(
        target=str(target_folder),
        data=str(write_chats(tmp_path / "train.jsonl", 40)),
        out=tmp_path / "out",
        cache=tmp_path / "cache",
        max_steps=8,
        batch_tokens=256,
        max_length=128,
        lr=1e-3,
        warmup=2,
        dtype="float32",
        device="cpu",
        log_every=2,
    )


def changed(config: TrainConfig, **values: Any) -> TrainConfig:
    return dataclasses.replace(config, **values)


def log(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, (folder / "log.jsonl").read_text().splitlines()) if line["kind"] == kind]


def run_until(trainer: Trainer, step: int, ends_it: type[BaseException]) -> None:
    """Train until something is raised in the middle of a step."""
    one = trainer._step

    def broken(*arguments: Any, **options: Any) -> Any:
        if trainer.position.step == step:
            raise ends_it
        return one(*arguments, **options)

    trainer._step = broken  # type: ignore[method-assign]
    with pytest.raises(ends_it):
        trainer.run()


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ({}, "float32"),
        ({"layers_inferred": 1}, "float32"),
        ({}, "bfloat16"),
        ({"draft_block": 13}, "float32"),
        ({"draws": 3}, "float32"),
        ({"without_entry": True}, "float32"),
        ({"paired": True}, "float32"),
        ({"paired": True, "draft_block": 13}, "float32"),
        ({"token_loss": "lk"}, "float32"),
    ],
    ids=str,
)
def test_training_reduces_the_loss_and_learns_the_target(
    config: TrainConfig,
    tmp_path: Path,
    write_chats: Callable[[Path, int], Path],
    sizes: dict[str, Any],
    dtype: Any,
):
    valid = str(write_chats(tmp_path / "valid.jsonl", 12))
    config = changed(config, max_steps=40, lr=5e-3, kl_weight=1.0, dtype=dtype, **sizes)
    config = changed(config, valid=valid, valid_every=20)
    assert train(config) == config.out
    losses = [line["loss"] for line in log(config.out, "train")]
    assert len(losses) == 20
    # The target's own entropy, some 4.8, is a floor.
    assert losses[-1] < losses[0] - 0.3
    checks = log(config.out, "valid")
    assert [line["step"] for line in checks] == [20, 40]
    assert checks[1]["loss"] < checks[0]["loss"]
    assert ("predicted" in checks[0]) == ("layers_inferred" in sizes)
    assert checks[1]["accuracy"][0] > 0.3
    assert 1.4 < checks[1]["acceptance_length"] < 7
    assert 8 <= len(checks[1]["accuracy"]) <= 13


@pytest.mark.parametrize(("method", "deepest"), [("eagle2", 1), ("eagle3", 3), ("independent", 13)])
def test_other_drafters_learn_too_and_are_served(
    config: TrainConfig, tmp_path: Path, write_chats: Callable[[Path, int], Path], method: Any, deepest: int
):
    valid = str(write_chats(tmp_path / "valid.jsonl", 12))
    config = changed(config, method=method, max_steps=60, lr=5e-3, kl_weight=1.0, valid=valid, valid_every=30)
    config = changed(config, unroll=3) if method == "eagle3" else config
    train(config)
    checks = log(config.out, "valid")
    assert checks[1]["loss"] < checks[0]["loss"]
    assert checks[1]["accuracy"][0] > 0.3
    assert deepest - 5 <= len(checks[1]["accuracy"]) <= deepest
    engine = load_engine(
        EngineConfig(
            model=config.target, drafter=str(config.out), dtype="float32", compile="off", draft_policy="fixed", max_num_seqs=1
        )
    )
    assert engine.drafter is not None and engine.info.drafter in method
    engine.add(Request("r", tuple(range(20, 40)), SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)))
    stats = [output.stats for _ in range(60) for output in engine.step()][-1]
    assert stats.num_accepted_draft_tokens > 0


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"draft_mlp": 8}, "--draft-mlp is no option of --method moa"),
        ({"method": "eagle2", "sa_mlp": 8}, "--sa-mlp is no option of --method eagle2"),
        ({"method": "eagle3", "draft_layers": 2}, "--draft-layers is no option of --method eagle3"),
        ({"method": "independent", "layers_inferred": 1}, "--layers-inferred is no option of --method independent"),
        ({"method": "eagle3", "draws": 2}, "--draws is no option of --method eagle3"),
        ({"unroll": 3}, "--unroll is no option of --method moa"),
        ({"method": "eagle2", "unroll": 3}, "--unroll is no option of --method eagle2"),
        ({"method": "eagle3", "unroll": 17}, "--unroll 17: at most 16 draft steps can be unrolled"),
        ({"method": "eagle2", "init_from": "bundled"}, "--init-from bundled is a drafter of --method moa, not eagle2"),
        ({"method": "independent", "init_from": "bundled"}, "--init-from bundled is a drafter of --method moa, not independent"),
        ({"method": "independent", "draft_vocabulary": 20}, "its own LM head knows all tokens"),
        ({"method": "eagle3", "init_from": "x", "draft_mlp": 8}, "--draft-mlp: with --init-from the drafter keeps its sizes"),
        ({"method": "eagle2", "init_from": "x", "draft_kv_heads": 2}, "--draft-kv-heads: with --init-from"),
        ({"method": "independent", "init_from": "x", "draft_layers": 2}, "--draft-layers: with --init-from"),
        ({"method": "independent", "init_from": "x", "draft_hidden": 32}, "--draft-hidden: with --init-from"),
    ],
)
def test_options_of_another_method_are_refused(config: TrainConfig, values: dict[str, Any], complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        changed(config, **values)


def test_the_drafter_is_saved_in_the_published_layout_with_its_recipe(config: TrainConfig):
    config = changed(config, sa_mlp=80, lsa_kv_heads=4, max_steps=2)
    train(config)
    trainer = prepare(changed(config, resume=True))
    task = trainer.task
    assert isinstance(task, MoATask)
    published = load_drafter(config.out, task.target.config, dtype=torch.float32)
    for (name, saved), (_, trained) in zip(published.named_parameters(), task.network.named_parameters(), strict=True):
        assert torch.equal(saved, trained.to(torch.bfloat16).float()), name
    assert published.config.sa_intermediate_size == 80
    assert {x.dtype for x in load_file(config.out / "model.safetensors").values()} == {torch.bfloat16}
    recipe = json.loads((config.out / "training.json").read_text())
    assert recipe["recipe"]["sa_mlp"] == 80
    assert recipe["result"]["step"] == 2
    named = json.loads((config.out / "config.json").read_text())["target_weights"]
    assert named == weights_name(Path(config.target))


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"accumulate": 2},
        {"draft_block": 13},
        {"draws": 2},
        {"without_entry": True},
        {"paired": True},
        {"paired": True, "draft_block": 13},
        {"without_lsa": True, "without_ca": True},
        {"method": "eagle2"},
        {"method": "eagle3"},
        {"method": "independent"},
        {"optimizer": "muon", "draft_block": 13},
    ],
    ids=str,
)
def test_a_resumed_run_equals_an_unbroken_one_to_the_bit(config: TrainConfig, tmp_path: Path, kind: dict[str, Any]):
    config = changed(config, max_steps=14, schedule="cosine", epochs=9.0, **kind)
    train(changed(config, out=tmp_path / "unbroken"))

    class Stopped(Exception):
        pass

    broken = prepare(changed(config, checkpoint_steps=5))
    run_until(broken, 7, Stopped)
    resumed = prepare(changed(config, resume=True))
    assert resumed.position.step == 5
    resumed.run()
    whole, pieced = weights(tmp_path / "unbroken"), weights(config.out)
    assert all(torch.equal(whole[name], pieced[name]) for name in whole)
    assert resumed.position.epoch > 0, "the run must cross an epoch for this to mean anything"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops_and_resuming_goes_on(config: TrainConfig, tmp_path: Path, number: int):
    train(changed(config, out=tmp_path / "unbroken"))
    trainer = prepare(config)
    step = trainer._step

    def signalled(*arguments: Any, **options: Any) -> Any:
        if trainer.position.step == 2:
            os.kill(os.getpid(), number)
        return step(*arguments, **options)

    trainer._step = signalled  # type: ignore[method-assign]
    before = signal.getsignal(number)
    with pytest.raises(TrainingInterrupted, match=r"at step 3; the state is saved") as stopped:
        trainer.run()
    assert stopped.value.number == number
    assert signal.getsignal(number) == before
    train(changed(config, resume=True))
    whole, pieced = weights(tmp_path / "unbroken"), weights(config.out)
    assert all(torch.equal(whole[name], pieced[name]) for name in whole)


def test_two_checkpoints_are_kept_and_a_half_written_one_is_never_read(config: TrainConfig):
    train(changed(config, checkpoint_steps=1, max_steps=4))
    folder = config.out / "checkpoints"
    assert [path.name for path in sorted(folder.iterdir())] == ["checkpoint-00000003.pt", "checkpoint-00000004.pt"]
    (folder / "checkpoint-00000009.tmp").write_bytes(b"half")
    assert prepare(changed(config, resume=True)).position.step == 4
    (folder / "checkpoint-00000009.pt").write_bytes(b"not one of ours")
    with pytest.raises(ConfigError, match=r"checkpoint-00000009\.pt is no checkpoint"):
        prepare(changed(config, resume=True))


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_named(config: TrainConfig):
    train(changed(config, checkpoint_steps=1, max_steps=2))
    path = config.out / "checkpoints" / "checkpoint-00000002.pt"
    whole = path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(whole[:middle] + bytes(255 - byte for byte in whole[middle : middle + 64]) + whole[middle + 64 :])
    before = r"delete it to go on from the one before it, checkpoint-00000001\.pt"
    with pytest.raises(ConfigError, match=rf"checkpoint-00000002\.pt is damaged \(.*data.*\); {before}"):
        prepare(changed(config, resume=True))
    path.write_bytes(whole[:middle])
    with pytest.raises(ConfigError, match=rf"checkpoint-00000002\.pt is no checkpoint of this trainer: .*; {before}"):
        prepare(changed(config, resume=True))
    path.unlink()
    assert prepare(changed(config, resume=True)).position.step == 1
    (path.parent / "checkpoint-00000001.pt").write_bytes(whole[:middle])
    with pytest.raises(ConfigError, match=r"there is none before it: delete it, and begin anew without --resume"):
        prepare(changed(config, resume=True))


def test_a_save_that_breaks_off_leaves_the_earlier_checkpoint(tmp_path: Path):
    save_checkpoint(tmp_path, {"step": 1}, 1)
    with pytest.raises(AttributeError):
        save_checkpoint(tmp_path, {"step": lambda: 2}, 2)
    assert [path.name for path in tmp_path.glob("*.pt")] == ["checkpoint-00000001.pt"]
    save_checkpoint(tmp_path, {"step": 3}, 3)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-00000001.pt", "checkpoint-00000003.pt"}


@contextmanager
def full_disk() -> Iterator[None]:
    """No file takes more than a few bytes."""
    earlier = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, earlier[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, earlier)


@pytest.mark.parametrize(("steps", "kept"), [([], "there is no earlier checkpoint"), ([1], "earlier checkpoints are whole")])
def test_a_full_disk_says_what_is_left(tmp_path: Path, steps: list[int], kept: str):
    for step in steps:
        save_checkpoint(tmp_path, {"step": step}, step)
    with full_disk(), pytest.raises(TrainingError, match=rf"is the disk full\? .*; {kept}$"):
        save_checkpoint(tmp_path, {"model": torch.zeros(10_000)}, 2)


def test_a_full_disk_is_told_in_a_line_and_leaves_what_was_there(config: TrainConfig):
    train(changed(config, max_steps=2))
    before = load_file(config.out / "model.safetensors")
    trainer = prepare(changed(config, resume=True))
    with full_disk(), pytest.raises(TrainingError, match=r"cannot write .*checkpoint-00000009\.pt, is the disk full\?"):
        save_checkpoint(config.out / "checkpoints", {"model": torch.zeros(10_000)}, 9)
    with full_disk(), pytest.raises(TrainingError, match=r"cannot write the network to .*, is the disk full\?"):
        export(trainer.task, trainer.config, {})
    assert [path.name for path in (config.out / "checkpoints").iterdir()] == ["checkpoint-00000002.pt"]
    after = load_file(config.out / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("state", [[1], {"model": {}}, "model"], ids=str)
def test_a_checkpoint_of_something_else_is_refused(config: TrainConfig, state: Any):
    train(changed(config, max_steps=1))
    path = config.out / "checkpoints" / "checkpoint-00000001.pt"
    if state == "model":
        state = torch.load(path, weights_only=True) | {"model": {"weight": torch.zeros(3)}}
    torch.save(state, path)
    with pytest.raises(ConfigError, match=r"checkpoint-00000001\.pt is (no checkpoint of this trainer|not of a run like this one)"):
        prepare(changed(config, resume=True))


@pytest.mark.parametrize("clip", [1.0, float("inf")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_that_diverges_ends_with_an_error_and_saves_nothing_of_it(config: TrainConfig, clip: float, dtype: Any):
    config = changed(config, clip=clip, dtype=dtype, checkpoint_steps=1)
    trainer = prepare(config)
    step = trainer._step

    def diverging(*arguments: Any, **options: Any) -> Any:
        if trainer.position.step == 3:
            next(trainer.task.network.parameters()).data.fill_(float("nan"))
        return step(*arguments, **options)

    trainer._step = diverging  # type: ignore[method-assign]
    with pytest.raises(
        TrainingError, match=r"no longer finite at step 4: lower --lr; the last checkpoint is .*checkpoint-00000003\.pt"
    ):
        trainer.run()
    assert all(
        bool(x.isfinite().all()) for x in [*weights(config.out).values(), *load_file(config.out / "model.safetensors").values()]
    )
    assert json.loads((config.out / "training.json").read_text())["result"]["step"] == 3


def test_weights_that_the_last_update_broke_are_not_saved(config: TrainConfig):
    trainer = prepare(changed(config, max_steps=1))
    step = trainer._step

    def broken(*arguments: Any, **options: Any) -> Any:
        line = step(*arguments, **options)
        next(trainer.task.network.parameters()).data.fill_(float("inf"))
        return line

    trainer._step = broken  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=r"no longer finite at step 1: lower --lr; there is no checkpoint yet"):
        trainer.run()
    assert not list(config.out.rglob("*.pt")) and not list(config.out.rglob("*.safetensors"))


def test_a_run_writes_over_no_model_but_its_own(
    config: TrainConfig, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("training.run.start", lambda _: pytest.fail("it has begun"))
    (tmp_path / "link").symlink_to(target_folder)
    for out in (target_folder, tmp_path / "link", target_folder / ".." / target_folder.name):
        with pytest.raises(ConfigError, match="is the folder of --target, which would be overwritten"):
            prepare(changed(config, out=out))
    shutil.copytree(target_folder, tmp_path / "other")
    with pytest.raises(ConfigError, match="is the folder of --init-from, which would be overwritten"):
        prepare(changed(config, out=tmp_path / "other", init_from=str(tmp_path / "other")))
    with pytest.raises(ConfigError, match=r"other holds a model that no run of this trainer wrote \(config\.json\)"):
        prepare(changed(config, out=tmp_path / "other"))
    with pytest.raises(ConfigError, match="is the folder of --target"):
        prepare(changed(config, target="bundled", out=BUNDLED["target"]))


def test_a_run_goes_on_after_its_export_and_over_one_without_checkpoints(config: TrainConfig):
    train(changed(config, max_steps=1))
    (config.out / "training.json").unlink()  # as where the first export was cut off
    train(changed(config, max_steps=2, resume=True))
    shutil.rmtree(config.out / "checkpoints")
    train(changed(config, max_steps=1))
    assert json.loads((config.out / "training.json").read_text())["result"]["step"] == 1


def test_places_that_cannot_be_written_are_named_before_anything_is_loaded(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("training.run.start", lambda _: pytest.fail("it has begun"))
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "x" / "y"):
        with pytest.raises(ConfigError, match=rf"--out {out}: {tmp_path}/file is no folder"):
            prepare(changed(config, out=out))
    with pytest.raises(ConfigError, match=r"--cache .*: .*file is no folder"):
        prepare(changed(config, cache=tmp_path / "file"))
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ConfigError, match=rf"--out .*: {tmp_path} cannot be written to"):
        prepare(config)


def test_what_a_killed_export_left_is_gone_after_the_next(config: TrainConfig):
    left = config.out / ".export-killed"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    train(changed(config, max_steps=1))
    names = {"checkpoints", "config.json", "log.jsonl", "model.safetensors", "training.json"}
    assert {path.name for path in config.out.iterdir()} == names


def test_a_resumed_run_logs_every_step_once(config: TrainConfig):
    config = changed(config, log_every=1, checkpoint_steps=3, valid=config.data, valid_every=5)
    trainer = prepare(config)
    run_until(trainer, 5, KeyboardInterrupt)
    with (config.out / "log.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # as where the program was killed while it wrote
    lines = (config.out / "log.jsonl").read_text().splitlines()[:-1]
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 5]
    for _ in range(2):  # also once it is over, where validation is all that is done again
        train(changed(config, resume=True))
        assert [line["step"] for line in log(config.out, "train")] == list(range(1, 9))
        assert [line["step"] for line in log(config.out, "valid")] == [5, 8]


def test_a_run_shorter_than_a_line_of_the_log_is_logged_and_comes_to_its_end(
    config: TrainConfig, capsys: pytest.CaptureFixture[str]
):
    train(changed(config, max_steps=3, log_every=10))
    assert "train 100%" in capsys.readouterr().err.splitlines()[-1]
    (line,) = log(config.out, "train")
    assert line["step"] == 3 and line["accuracy"] and line["acceptance_length"] >= 1
    train(changed(config, max_steps=3, log_every=10, resume=True))
    told = capsys.readouterr().err
    assert "nothing is left to train: step 3 is at the end of --max-steps 3 already; raise it to train on" in told
    assert log(config.out, "train") == [line]


def test_conversations_that_teach_nothing_are_counted(config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    prepare(config)
    assert "left out" not in capsys.readouterr().err
    path = Path(config.data or "")
    share = [{"role": "human", "content": "tea"}, {"role": "gpt", "content": "milk"}]
    long = [{"role": "user", "content": "tea " * 150}, {"role": "assistant", "content": "milk"}]
    with path.open("a") as file:
        for messages in (share, share, long):
            file.write(json.dumps({"messages": messages}) + "\n")
    for _ in range(2):  # also of text that is kept from before
        prepare(config)
        told = capsys.readouterr().err
        assert f"{path}: 2 of 43 conversations have no assistant turn and are left out" in told
        assert f"{path}: 1 have no answer within --max-length 128 and are left out" in told


def test_the_bundled_drafter_can_be_trained_on(config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(CheckpointError, match="concierge-moa was made for a target with"):
        prepare(changed(config, init_from="bundled"))
    with pytest.raises(ConfigError, match="is the folder of --init-from, which would be overwritten"):
        prepare(changed(config, init_from="bundled", out=BUNDLED["drafter"]))
    train(changed(config, max_steps=1, sa_mlp=48))
    monkeypatch.setitem(BUNDLED, "drafter", config.out)
    task = prepare(changed(config, init_from="bundled", out=tmp_path / "further")).task
    assert isinstance(task, MoATask) and task.network.config.sa_intermediate_size == 48


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({"draft_hidden": 10}, "--draft-hidden 10 must be a multiple of the target's head size, 16"),
        ({"draft_hidden": 40}, "--draft-hidden 40 must be a multiple"),
        ({"draft_hidden": 32, "draft_kv_heads": 3}, "--draft-kv-heads 3 must divide the drafter's 2 heads"),
    ],
)
def test_sizes_of_small_models_that_do_not_divide_are_named(config: TrainConfig, sizes: dict[str, int], complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        prepare(changed(config, method="independent", **sizes))


def test_a_run_cut_off_in_its_first_checkpoint_begins_anew(config: TrainConfig):
    folder = config.out / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "checkpoint-00000001.tmp").write_bytes(b"half")
    train(changed(config, max_steps=2))
    assert [path.name for path in folder.iterdir()] == ["checkpoint-00000002.pt"]


def test_a_gpu_is_not_silently_done_without(config: TrainConfig, monkeypatch: pytest.MonkeyPatch):
    class OnCpu:
        device = torch.device("cpu")

    monkeypatch.setattr("training.beginning.Accelerator", lambda **_: OnCpu())
    with pytest.raises(ConfigError, match="--device cuda: PyTorch sees no GPU here"):
        prepare(changed(config, device="cuda"))


def test_intervals_must_fit_the_block_that_is_trained_on(config: TrainConfig, tmp_path: Path):
    train(changed(config, max_steps=1, draft_block=9, max_interval=10))
    further = changed(config, out=tmp_path / "further", init_from=str(config.out))
    with pytest.raises(ConfigError, match=r"--max-interval 14 drafts 13 positions, .* a block of 9: say --max-interval 10 or less"):
        prepare(further)
    train(changed(further, max_steps=1, max_interval=10))


def test_a_block_that_is_added_starts_from_what_a_paired_drafter_has_learnt(config: TrainConfig, tmp_path: Path):
    config = changed(config, max_steps=30, lr=5e-3, kl_weight=1.0, feature_weight=0.0, log_every=1, paired=True)
    train(config)
    learnt = [line["loss"] for line in log(config.out, "train")]
    further = changed(config, out=tmp_path / "further", init_from=str(config.out), draft_block=13, lr=1e-3, warmup=0, max_steps=20)
    train(further)
    losses = [line["loss"] for line in log(further.out, "train")]
    # Its features enter the LM head without the norm that they were trained with, but as large.
    assert losses[0] < learnt[0] - 0.2
    assert sum(losses[-5:]) < sum(losses[:5])


def test_resuming_needs_the_same_recipe_and_data(config: TrainConfig, tmp_path: Path, write_chats: Callable[[Path, int], Path]):
    with pytest.raises(ConfigError, match="no checkpoint"):
        prepare(changed(config, resume=True))
    train(changed(config, max_steps=2))
    with pytest.raises(ConfigError, match="add --resume"):
        prepare(config)
    with pytest.raises(ConfigError, match=r"lr was 0\.001 and is now 0\.1"):
        prepare(changed(config, resume=True, lr=0.1))
    other = str(write_chats(tmp_path / "other.jsonl", 7))
    with pytest.raises(ConfigError, match="is not what"):
        prepare(changed(config, resume=True, data=other))
    assert prepare(changed(config, resume=True, max_steps=99)).position.step == 2


def test_a_run_is_resumed_beside_the_target_that_it_began_with(config: TrainConfig, target_folder: Path, tmp_path: Path):
    train(changed(config, max_steps=2))
    other, moved = (shutil.copytree(target_folder, tmp_path / name) for name in ("other", "moved"))
    tensors = load_file(other / "model.safetensors")
    save_file({name: x * 1.5 if "norm" in name else x for name, x in tensors.items()}, other / "model.safetensors")
    with pytest.raises(ConfigError, match="was trained for another target: give the --target that it began with"):
        prepare(changed(config, resume=True, target=str(other)))
    assert prepare(changed(config, resume=True, target=str(moved))).position.step == 2
    path = config.out / "checkpoints" / "checkpoint-00000002.pt"
    torch.save({name: value for name, value in torch.load(path, weights_only=True).items() if name != "target"}, path)
    assert prepare(changed(config, resume=True, target=str(other))).position.step == 2, "earlier versions did not keep it"


@pytest.mark.parametrize(
    ("position", "limits", "progress"),
    [
        (Position(step=5), {"max_steps": 20}, 0.25),
        (Position(step=5, seconds=90.0), {"max_steps": 20, "max_minutes": 2.0}, 0.75),
        (Position(epoch=1), {"max_steps": None, "epochs": 2.0}, 0.5),
    ],
)
def test_progress_is_that_of_the_nearest_limit(config: TrainConfig, position: Position, limits: dict[str, Any], progress: float):
    trainer: Trainer = prepare(changed(config, **limits))
    trainer.position = position
    assert trainer.progress() == progress


def test_epochs_and_minutes_end_a_run(config: TrainConfig):
    trainer = prepare(changed(config, max_steps=None, epochs=1.0))
    trainer.run()
    assert (trainer.position.epoch, trainer.position.batch) == (0, len(trainer._plan(0)))
    timed = prepare(changed(config, max_steps=None, max_minutes=0.01, out=config.out / "timed"))
    timed.run()
    assert 0.6 <= timed.position.seconds < 20


def test_rates_warm_up_and_follow_their_schedule():
    assert [rate_factor("constant", step, 4, 0.0) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert [rate_factor("linear", 99, 4, progress) for progress in (0.0, 0.25, 1.0)] == [1.0, 0.75, 0.0]
    assert [round(rate_factor("cosine", 99, 0, progress), 9) for progress in (0.0, 0.5, 1.0)] == [1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"max_steps": None}, "say when to stop"),
        ({"lr": 0.0}, "--lr must be above 0"),
        ({"lr": float("nan")}, "--lr must be above 0, not nan"),
        ({"lr": float("inf")}, "--lr must be finite"),
        ({"clip": float("nan")}, "--clip must be above 0"),
        ({"epochs": float("nan")}, "--epochs must be above 0"),
        ({"weight_decay": float("nan")}, "--weight-decay must not be negative"),
        ({"beta2": 2.0}, "--beta2 must be at least 0 and below 1"),
        ({"beta2": float("nan")}, "--beta2 must be"),
        ({"seed": -1}, "--seed must be from 0"),
        ({"seed": 2**32}, "--seed must be from 0"),
        ({"sa_kv_heads": 0}, "--sa-kv-heads must be above 0"),
        ({"sa_mlp": -1}, "--sa-mlp must be above 0"),
        ({"min_interval": 8, "max_interval": 6}, "intervals need"),
        ({"kl_weight": 0.0, "feature_weight": 0.0}, "nothing would be learnt"),
        ({"kl_weight": -1.0}, "must not be negative"),
        ({"draft_block": 12, "max_interval": 14}, "intervals of up to 14 draft 13 positions: raise --draft-block"),
        ({"draft_block_mlp": 8}, "--draft-block-mlp needs --draft-block"),
        ({"device": "cuda:1"}, "--device cuda:1: auto, cpu, cuda are what can be said; CUDA_VISIBLE_DEVICES chooses"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(config: TrainConfig, values: dict[str, Any], complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        changed(config, **values)


def test_lengths_beyond_the_target_or_before_any_response_are_refused(config: TrainConfig):
    with pytest.raises(ConfigError, match="beyond the target's 512 positions"):
        prepare(changed(config, max_length=1024))
    with pytest.raises(ConfigError, match="--layers-inferred 4: of this target's 4 layers at most 3 can be borrowed"):
        prepare(changed(config, layers_inferred=4))
    with pytest.raises(DataError, match="no response token within --max-length 4"):
        prepare(changed(config, max_length=4))
