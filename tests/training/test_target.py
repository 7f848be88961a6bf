"""Training a target: the loss is the textbook's, it learns, what it writes is what transformers reads, and it resumes."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from models.loader import load_target
from training.batches import Packed, held_out
from training.config import PretrainConfig
from training.data import Corpus
from training.errors import ConfigError, DataError
from training.pretrain import app
from training.run import prepare_target, pretrain


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


def test_packed_rows_hold_every_conversation_once_and_tell_answers_apart():
    tokens = np.arange(1, 30, dtype=np.int32)
    source = Packed(Corpus(tokens, tokens % 2 == 0, np.array([0, 4, 9, 29]), "key"), 4, 8, 0, separator=0, name="chats")

    def flat(number: int) -> list[int]:
        epoch = source.epoch(number)
        assert len(epoch) == 4 and epoch[0].token_ids.shape == (2, 4)
        text, response = (torch.cat([getattr(epoch[i], part).flatten() for i in range(4)]) for part in ("token_ids", "response"))
        assert torch.equal(response, (text % 2 == 0) & (text > 0))
        return [int(token) for token in text]

    conversations = {tuple(range(1, 5)), tuple(range(5, 10)), tuple(range(10, 30))}
    orders = set()
    for number in range(8):
        text = flat(number)
        ends = [index for index, token in enumerate(text) if token == 0]
        parts = [tuple(text[start:end]) for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)]
        assert set(parts) == conversations and len(parts) == 3
        orders.add(tuple(parts))
        assert text == flat(number)
    assert len(orders) > 2


def test_too_little_text_for_a_batch_is_refused():
    corpus = Corpus(np.ones(5, np.int32), np.ones(5, np.bool_), np.array([0, 5]), "key")
    with pytest.raises(DataError, match=r"chats: fewer tokens than a batch of 2 × --max-length 4"):
        Packed(corpus, 4, 8, 0, separator=0, name="chats")
    assert held_out(Packed(corpus, 3, 3, 0, separator=0, name="chats"), 100), "as much as there is"


@pytest.mark.parametrize("fresh", [False, True])
def test_it_learns_and_transformers_reads_what_comes_out(config: PretrainConfig, fresh: bool, tmp_path: Path):
    if fresh:
        config = dataclasses.replace(config, fresh=True, layers=3, hidden_size=48, heads=4, kv_heads=2, mlp=64)
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


def test_a_resumed_run_equals_an_unbroken_one_to_the_bit(config: PretrainConfig, tmp_path: Path):
    config = dataclasses.replace(config, schedule="cosine", epochs=9.0, prompt_weight=0.3)
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
