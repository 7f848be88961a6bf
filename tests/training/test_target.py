"""Training a target: the loss is the textbook's, it learns, what it writes is what transformers reads, and it resumes."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from models.causal_attention import suits
from models.loader import load_target
from models.tiles import has_tiles
from training.batches import Batch
from training.choices import Optimizer
from training.config import PretrainConfig
from training.errors import ConfigError
from training.pretrain import app
from training.progress import Meter
from training.run import prepare_target, pretrain
from training.tasks.target import TargetTask


@pytest.fixture
def config(target_folder: Path, tmp_path: Path, write_chats: Callable[[Path, int], Path]) -> PretrainConfig:
    return PretrainConfig(
        base=str(target_folder),
        data=str(write_chats(tmp_path / "train.jsonl", 40)),
        out=tmp_path / "out",
        cache=tmp_path / "cache",
        max_steps=12,
        batch_tokens=512,
        max_length=256,
        lr=3e-3,
        warmup=2,
        dtype="float32",
        device="cpu",
        log_every=2,
    )


@torch.no_grad()
@pytest.mark.parametrize("prompt_weight", [1.0, 0.3])
def test_the_loss_is_over_conversations_without_their_padding(config: PretrainConfig, prompt_weight: float):
    task = prepare_target(dataclasses.replace(config, prompt_weight=prompt_weight)).task
    assert isinstance(task, TargetTask)
    batch = task.source.epoch(0)[0]
    assert len({int(row.nonzero()[-1]) for row in batch.response}) > 1, "some rows must be padded for this to mean anything"
    loss, depths = task.loss(task.module, batch, torch.Generator(), 0.0, agreement=True)
    losses, weights = [], []
    for token_ids, response in zip(batch.token_ids, batch.response, strict=True):
        length = int(response.nonzero()[-1]) + 1
        logits = task.network.logits(task.network.encode(token_ids[None, :length]).hidden[0])
        losses.append(F.cross_entropy(logits[:-1], token_ids[1:length], reduction="none"))
        weights.append(torch.where(response[1:length], 1.0, prompt_weight))
    each, weight = torch.cat(losses), torch.cat(weights)
    torch.testing.assert_close(loss.loss, (each * weight).sum() / weight.sum())
    torch.testing.assert_close(loss.parts["text"].value, each.mean())
    torch.testing.assert_close(loss.parts["answers"].value, each[batch_answers(batch)].mean())
    assert len(depths) == len(each) and loss.correct is not None and len(loss.correct) == len(each)


def test_an_updates_rows_count_alike_however_many_stand_in_a_batch(config: PretrainConfig):
    trainer = prepare_target(dataclasses.replace(config, accumulate=3, prompt_weight=0.3, clip=1e9))
    task = trainer.task
    assert isinstance(task, TargetTask)
    batches = [task.source.epoch(0)[number] for number in range(3)]
    losses, weights = [], []
    for batch in batches:
        for token_ids, response in zip(batch.token_ids, batch.response, strict=True):
            length = int(response.nonzero()[-1]) + 1
            logits = task.network.logits(task.module(token_ids[None, :length]))
            losses.append(F.cross_entropy(logits[:-1], token_ids[1:length], reduction="none"))
            weights.append(torch.where(response[1:length], 1.0, 0.3))
    sums = [float(sum(weight.sum() for weight in weights[:count])) for count in (len(batches[0].token_ids), len(weights))]
    assert abs(sums[0] / sums[1] - 1 / 3) > 0.02, "batches must be of different sizes for this to mean anything"
    mean = (torch.cat(losses) * torch.cat(weights)).sum() / torch.cat(weights).sum()
    gradients = torch.autograd.grad(mean, list(task.network.parameters()))
    line = trainer._step(0.0, Meter(1), agreement=False)
    assert line["norm"] == pytest.approx(float(torch.stack([x.norm() for x in gradients]).norm()), abs=2e-4)
    assert line["batch_tokens"] == sum(batch.token_ids.numel() for batch in batches)


def batch_answers(batch: Batch) -> torch.Tensor:
    """Which of a batch's next tokens assistants wrote, padding left out."""
    return torch.cat([row[1 : int(row.nonzero()[-1]) + 1] for row in batch.response])


def test_the_base_is_not_written_over(config: PretrainConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("training.run.start", lambda _: pytest.fail("it has begun"))
    with pytest.raises(ConfigError, match="is the folder of --base, which would be overwritten"):
        prepare_target(dataclasses.replace(config, out=Path(config.base)))


@pytest.mark.parametrize("fresh", [False, True])
def test_it_learns_and_transformers_reads_what_comes_out(config: PretrainConfig, fresh: bool, tmp_path: Path):
    if fresh:
        config = dataclasses.replace(config, fresh=True, layers=3, hidden_size=48, heads=4, kv_heads=2, mlp=64, optimizer="muon")
    config = dataclasses.replace(config, max_steps=30, valid=config.data, valid_every=10)
    assert pretrain(config) == config.out
    lines = [json.loads(line) for line in (config.out / "log.jsonl").read_text().splitlines()]
    losses = [line["answers"] for line in lines if line["kind"] == "valid"]
    assert len(losses) == 3 and losses[2] < losses[0] - 0.3
    reference = AutoModelForCausalLM.from_pretrained(config.out, dtype=torch.float32)
    assert len(AutoTokenizer.from_pretrained(config.out)) == len(AutoTokenizer.from_pretrained(config.base))
    ours, _ = load_target(config.out, dtype=torch.float32)
    token_ids = torch.randint(0, 160, (1, 20))
    with torch.no_grad():
        logits = ours.logits(ours.encode(token_ids).hidden[0])
        torch.testing.assert_close(logits, reference(token_ids).logits[0], atol=1e-4, rtol=0)
    assert {x.dtype for x in load_file(config.out / "model.safetensors").values()} == {torch.bfloat16}
    newest = max((config.out / "checkpoints").glob("*.pt"))
    master = torch.load(newest, weights_only=True)["model"]
    torch.testing.assert_close(ours.embedding.weight, master["embedding.weight"].bfloat16().float(), atol=0, rtol=0)


@pytest.mark.parametrize("optimizer", get_args(Optimizer))
def test_a_resumed_run_equals_an_unbroken_one_to_the_bit(config: PretrainConfig, tmp_path: Path, optimizer: Optimizer):
    config = dataclasses.replace(config, schedule="cosine", epochs=9.0, prompt_weight=0.3, optimizer=optimizer)
    pretrain(dataclasses.replace(config, out=tmp_path / "unbroken"))
    broken = prepare_target(dataclasses.replace(config, checkpoint_steps=5))
    step = broken._step

    def fail_at_7(*arguments: object, **options: object) -> object:
        if broken.position.step == 7:
            raise InterruptedError
        return step(*arguments, **options)  # type: ignore[arg-type]

    broken._step = fail_at_7  # type: ignore[assignment,method-assign]
    with pytest.raises(InterruptedError):
        broken.run()
    prepare_target(dataclasses.replace(config, resume=True)).run()
    whole, pieced = (
        torch.load(max((folder / "checkpoints").glob("*.pt")), weights_only=True)["model"]
        for folder in (tmp_path / "unbroken", config.out)
    )
    assert all(torch.equal(whole[name], pieced[name]) for name in whole)


def test_sizes_need_a_fresh_network_and_must_divide(config: PretrainConfig):
    with pytest.raises(ConfigError, match="say --fresh"):
        dataclasses.replace(config, layers=3)
    with pytest.raises(ConfigError, match="--hidden-size 50 must be a multiple of --heads 4"):
        prepare_target(dataclasses.replace(config, fresh=True, hidden_size=50, heads=4))


def test_the_command_says_what_is_wrong(config: PretrainConfig):
    result = CliRunner().invoke(
        app, ["--data", "missing.jsonl", "--base", config.base, "--out", str(config.out), "--max-steps", "1", "--max-length", "256"]
    )
    assert result.exit_code == 2
    assert "moaserve pretrain: missing.jsonl: no such file" in result.output


@pytest.mark.integration
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler: install g++")
@pytest.mark.filterwarnings("default")  # of torch.compile itself
def test_compiled_it_learns_the_same(config: PretrainConfig, tmp_path: Path):
    config = dataclasses.replace(config, fresh=True, hidden_size=48, heads=3, kv_heads=1, dtype="bfloat16", valid=config.data)
    losses = []
    for compiled in (False, True):
        folder = tmp_path / f"compiled-{compiled}"
        pretrain(dataclasses.replace(config, compile=compiled, out=folder, valid_every=6))
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        losses.append([line["text"] for line in lines if line["kind"] == "valid"])
    with torch.autocast("cpu", torch.bfloat16):
        assert suits(torch.zeros(1, 1, 3, 16)) == has_tiles(), "our own attention is for CPUs with tiles"
    plain, compiled = losses
    assert plain[1] < plain[0] - 0.1
    assert compiled == pytest.approx(plain, rel=0.01)
