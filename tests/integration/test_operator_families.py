"""Engines on operators whose targets are of Qwen's families, or too large for PyTorch's compiler."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from models.layers import Linear
from models.saving import save_drafter
from speculative import packages
from speculative.compiling import own_layers
from speculative.drafters.independent import IndependentDrafter
from speculative.drafters.moa import MoADrafter
from speculative.drafters.wrapper import innermost
from speculative.engine import Engine
from speculative.memory_measuring import weight_bytes
from speculative.request import Request, SamplingParams
from tests.integration.compiling import load
from tests.speculative.conftest import MOA_KINDS, random_moa

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("operators"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs g++"),
]

SIZES = {"vocab_size": 160, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 3, "num_key_value_heads": 2}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [2, 7, 1, 8] * 20]


def _random(model: PreTrainedModel) -> PreTrainedModel:
    """With weights of which none is of no account."""
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    return model.eval()


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A checkpoint and transformers' own model of it."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen2":
        model = _random(Qwen2ForCausalLM(Qwen2Config(**SIZES, num_attention_heads=6, max_position_embeddings=256)))
    else:
        sizes = {"num_attention_heads": 4, "head_dim": 32, "tie_word_embeddings": True, "max_position_embeddings": 256}
        model = _random(Qwen3ForCausalLM(Qwen3Config(**SIZES, **sizes)))
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(autouse=True)
def threads() -> object:
    """Engines are of one thread here, and say so to the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def answers(engine: Engine, params: SamplingParams) -> list[list[int]]:
    """What an engine answers to all prompts at once."""
    texts: dict[str, list[int]] = {str(number): [] for number in range(len(PROMPTS))}
    for name, prompt in zip(texts, PROMPTS, strict=True):
        engine.add(Request(name, tuple(prompt), params))
    while engine.has_work:
        for output in engine.step():
            texts[output.request_id].extend(output.new_token_ids)
    return list(texts.values())


def on_operators(engine: Engine) -> bool:
    return engine.tree_pass is not None and not any(parameter.numel() for parameter in layers_products(engine))


def layers_products(engine: Engine) -> list[torch.Tensor]:
    """The weights as they were loaded of what operators multiply with."""
    layers = engine.target.layers[: own_layers(engine)]
    return [each for layer in layers for name, each in layer.named_parameters() if each.dim() == 2 or name.endswith("down.weight")]


@pytest.mark.parametrize("speculative", [True, False])
def test_greedy_answers_are_transformers(family: tuple[Path, PreTrainedModel], speculative: bool) -> None:
    folder, model = family
    engine = load("on", model=str(folder), drafter="ngram", num_threads=1)
    assert on_operators(engine)
    told = answers(engine, SamplingParams(32, temperature=0.0, ignore_eos=True, speculative=speculative))
    for prompt, answer in zip(PROMPTS, told, strict=True):
        with torch.inference_mode():
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=32, min_new_tokens=32, do_sample=False, pad_token_id=0)
        assert answer == expected[0, len(prompt) :].tolist()


def test_sampled_answers_are_the_uncompiled_engines(family: tuple[Path, PreTrainedModel]) -> None:
    params = SamplingParams(32, temperature=0.9, top_p=0.95, seed=4, ignore_eos=True)
    settings = {"model": str(family[0]), "drafter": "ngram", "num_threads": 1}
    assert answers(load("on", **settings), params) == answers(load("off", **settings), params)


@pytest.mark.parametrize(("kind", "by_operators"), [("paired block", True), ("block", True), ("entry", False)])
def test_a_large_target_runs_on_operators_and_its_drafter_where_it_can(
    kind: str, by_operators: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_drafter(random_moa(**MOA_KINDS[kind]), tmp_path, dtype=torch.float32)
    exact = load("off", drafter=str(tmp_path), num_threads=1)
    monkeypatch.setattr(packages, "LARGEST_COMPILED", 1000)
    monkeypatch.setattr(packages, "compile_graph", lambda *_: pytest.fail("PyTorch's compiler was run"))
    engine = load("auto", drafter=str(tmp_path), num_threads=1)
    drafter = innermost(engine.drafter)
    assert isinstance(drafter, MoADrafter) and on_operators(engine)
    assert drafter.runs_compiled == by_operators == (drafter.trees is not None)
    for params in (
        SamplingParams(24, temperature=0.0, ignore_eos=True),
        SamplingParams(24, temperature=0.9, seed=3, ignore_eos=True),
    ):
        assert answers(engine, params) == answers(exact, params)


@pytest.mark.parametrize(
    "speculating", [{"draft_depth": 4, "draft_breadth": 2, "draft_nodes": 7}, {"draft_depth": 3, "draft_breadth": 1}]
)
def test_a_small_model_that_drafts_runs_on_operators(family: tuple[Path, PreTrainedModel], speculating: dict[str, int]) -> None:
    """Its own model drafts for a target here, so that nearly all is accepted that is drafted right."""
    settings = {"model": str(family[0]), "drafter": str(family[0]), "num_threads": 1, "draft_lookup": 0, **speculating}
    engine, exact = load("on", **settings), load("off", **settings)
    drafter = innermost(engine.drafter)
    assert isinstance(drafter, IndependentDrafter) and drafter.runs_compiled and on_operators(engine)
    assert not weight_bytes(*(each for each in drafter.model.layers.modules() if isinstance(each, Linear) and each.bias is None))
    for params in (
        SamplingParams(30, temperature=0.0, ignore_eos=True),
        SamplingParams(30, temperature=0.9, seed=3, ignore_eos=True),
    ):
        assert answers(engine, params) == answers(exact, params)
    assert passes(engine) == passes(exact) < 20, "of 30 tokens"


def passes(engine: Engine) -> int:
    """Steps that bring a text's 30 tokens."""
    engine.add(Request("alone", tuple(PROMPTS[0]), SamplingParams(30, temperature=0.0, ignore_eos=True)))
    count = 0
    while engine.has_work:
        count += len(engine.step())
    return count


def test_layers_that_a_drafter_runs_through_keep_their_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "LARGEST_COMPILED", 1000)
    save_drafter(random_moa(target_layer_inference=1), tmp_path, dtype=torch.float32)
    pair = {"drafter": str(tmp_path), "num_threads": 1}
    engine, exact = load("auto", **pair), load("off", **pair)
    assert on_operators(engine)
    assert own_layers(engine) == engine.target.config.num_layers - 1
    assert weight_bytes(engine.target.layers[-1]) == weight_bytes(exact.target.layers[-1])
    params = SamplingParams(24, temperature=0.0, ignore_eos=True)
    assert answers(engine, params) == answers(exact, params)
