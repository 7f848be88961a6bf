"""The measurement of steps, on whatever there is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from app.cli import cli
from benchmarks.gpu import BLOCK, SHAPES, bandwidth, measure_shape, random_engine
from speculative.drafters.moa import MoADrafter
from speculative.drafters.wrapper import innermost
from speculative.policy import DraftShape

CPU = torch.device("cpu")


def test_every_step_is_taken_launched_and_recorded() -> None:
    costs = measure_shape(SHAPES["tiny"], [1, 3], [9, 12], CPU, torch.float32, 1e9)
    assert [(step.replayed, step.batch, step.nodes) for step in costs.steps] == [
        (replayed, batch, nodes) for replayed in (False, True) for batch in (1, 3) for nodes in (9, 12)
    ]
    for step in costs.steps:
        assert min(step.plain, step.draft, step.verify, step.commit) > 0
    # A verification reads all weights but the embeddings, and each text's keys and values.
    sizes = SHAPES["tiny"].target
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert costs.read_bytes == 4 * (3 * layer + 64 + 512 * 64)
    one, three = (step.floor for step in costs.steps if step.replayed and step.nodes == 9)
    text = (three - one) / 2 * 1e9
    assert text == pytest.approx(4 * sizes.kv_size * sizes.num_layers * 260)


@pytest.mark.parametrize(("name", "parameters"), [("8b", 8.03e9), ("1b", 1.236e9)])
def test_shapes_are_those_of_published_models(name: str, parameters: float) -> None:
    config = SHAPES[name].target
    attention = config.hidden_size * (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = attention + 3 * config.hidden_size * config.intermediate_size + 2 * config.hidden_size
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    assert config.num_layers * layer + config.hidden_size + embeddings == pytest.approx(parameters, rel=0.001)


def test_the_drafter_is_one_of_a_block_in_the_authors_proportions() -> None:
    engine = random_engine(SHAPES["tiny"], DraftShape(BLOCK - 1, 4, 9), 2, CPU, torch.float32)
    drafter = innermost(engine.drafter)
    assert isinstance(drafter, MoADrafter) and drafter.network.moa.block is not None
    assert drafter.network.moa.config.sa_intermediate_size == 96 and drafter.scratch == BLOCK
    assert bandwidth(CPU, 1) > 1e6


def test_the_command_prints_tables_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    given = [
        "--batch",
        "1",
        "--num-prompts",
        "1",
        "--max-tokens",
        "4",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--json",
        str(path),
    ]
    result = CliRunner().invoke(cli, ["bench", "gpu", *given], env={"COLUMNS": "160", "MOASERVE_COMPILE": "off"})
    assert result.exit_code == 0, result.output
    assert "recorded" in result.output and "launched" in result.output
    told = json.loads(path.read_text())
    assert [step["replayed"] for step in told["shapes"][0]["steps"]] == [False, True]
    assert told["bundled"]["identical_outputs"]["speculative/plain"] == 1
    assert "commit" in told["provenance"]


def test_unknown_shapes_are_refused_by_name() -> None:
    result = CliRunner().invoke(cli, ["bench", "gpu", "--shape", "70b", "--device", "cpu"])
    assert result.exit_code != 0 and "--shape 70b" in result.output
