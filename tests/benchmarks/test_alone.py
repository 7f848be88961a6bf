"""What drafters write alone: a drafter that is the target writes what the target would, and a MoA drafter from sent memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from app.cli import cli
from benchmarks.alone import Continuation, figures, measure
from benchmarks.decoding import decode
from benchmarks.prompts import Prompt
from models.loader import BUNDLED, load_tokenizer
from speculative.config import EngineConfig
from speculative.engine import Engine
from speculative.loading import load_engine
from speculative.placement import torch_dtype
from speculative.policy import DraftShape
from speculative.request import SamplingParams

CONFIG = EngineConfig(
    dtype="float32",
    compile="off",
    num_threads=1,
    max_num_seqs=1,
    max_model_len=400,
    draft_policy="fixed",
    draft_lookup=0,
    prefix_cache_tokens=0,
)
TOOL = {
    "type": "function",
    "function": {
        "name": "find_restaurant",
        "description": "Find a restaurant",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    tokenizer = load_tokenizer(BUNDLED["target"])
    assert tokenizer is not None
    asked = [("find me a restaurant in Oakland", [TOOL]), ("Write a Python function that adds two numbers.", None)]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tools=tools, tokenize=False, add_generation_prompt=True)
        for text, tools in asked
    ]
    return [Prompt("test", tuple(tokenizer(text, add_special_tokens=False)["input_ids"])) for text in texts]


def test_the_target_as_its_own_drafter_writes_the_same(prompts: list[Prompt]) -> None:
    configs = {"itself": replace(CONFIG, drafter=str(BUNDLED["target"]))}
    ((name, continuations),) = measure(load_engine, configs, prompts, cuts=[0.0, 0.3, 0.8], max_tokens=40)
    assert name == "itself" and len(continuations) == 6
    for each in continuations:
        # It writes on where the target was stopped by max_tokens.
        assert each.common == each.rest and each.similarity > 0.6 and each.call in (True, None)


def test_from_memory_a_drafter_goes_on_as_its_tree_begins(prompts: list[Prompt]) -> None:
    begun: list[int] = []

    def load(config: EngineConfig) -> Engine:
        engine = load_engine(config)
        step = engine.step

        def watched():  # the whole drafter's likeliest token where the text waits
            outputs = step()
            waiting = [each for each in engine.scheduler.running if each.waits]
            if waiting and engine.drafter is not None:
                here = replace(waiting[0], request=replace(waiting[0].request, remote=False))
                begun.append(int(engine.drafter.propose([here], DraftShape(1, 1, 1), engine.cache).tokens[0, 0]))
            return outputs

        engine.step = watched  # type: ignore[method-assign]
        return engine

    ((_, continuations),) = measure(load, {"moa": CONFIG}, prompts, cuts=[0.25, 0.5, 0.75], max_tokens=40)
    assert len(continuations) == len(begun) == 6
    assert all(0 <= each.common <= each.rest and 0 <= each.similarity <= 1 for each in continuations)
    plain = load_engine(replace(CONFIG, drafter="none"))
    right = []
    for prompt in prompts:
        answer = decode(plain, prompt, SamplingParams(40, temperature=0.0)).token_ids
        right += [answer[round(cut * len(answer)) + 1] for cut in (0.25, 0.5, 0.75)]
    assert [each.common > 0 for each in continuations] == [one == other for one, other in zip(begun, right, strict=True)]
    assert any(each.common > 0 for each in continuations)


def test_an_interrupt_leaves_the_figures_of_the_drafters_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(config: EngineConfig) -> Engine:
        if config.drafter == "last":
            raise KeyboardInterrupt
        return load_engine(config)

    monkeypatch.setattr("speculative.loading.load_engine", load)
    path = tmp_path / "alone.json"
    options = ["--num-prompts", "1", "--max-tokens", "12", "--cut", "0.5", "--num-threads", "1", "--json", str(path)]
    done = CliRunner().invoke(cli, ["bench", "alone", "--drafter", "ngram", "--drafter", "last", *options])
    assert done.exit_code == 1 and "it was interrupted after 1 of 2 drafters" in done.output
    told = json.loads(path.read_text())
    assert [row["drafter"] for row in told["results"]] == ["ngram"]
    uncompiled = torch_dtype("auto", torch.device("cpu"), compiled=False)
    assert f"torch.{told['settings']['dtype']}" == str(uncompiled), "what auto came to"


def test_figures_are_means_over_answers() -> None:
    some = [
        Continuation("a", 0.5, 10, 10, 1.0, True),
        Continuation("a", 0.5, 10, 5, 0.5, None),
        Continuation("a", 0.5, 10, 0, 0.0, False),
    ]
    each = figures(some)
    assert (each.answers, each.agreement, each.similarity, each.calls, each.calls_exact) == (3, 0.5, 0.5, 2, 0.5)
    assert each.exact == pytest.approx(1 / 3)
    assert figures([]).similarity != figures([]).similarity


def test_the_command_makes_the_folder_of_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.alone.measure", lambda *_, **__: [("ours", [])])
    path = tmp_path / "new" / "alone.json"
    done = CliRunner().invoke(cli, ["bench", "alone", "--drafter", "ours=auto", "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert json.loads(path.read_text())["settings"]["drafters"] == {"ours": "auto"}
