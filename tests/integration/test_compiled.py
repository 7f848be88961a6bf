"""Engines on compiled graphs: the same tokens as without, greedy and seeded, alone and together."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from models.compiled import default_cache
from models.graph_runner import runner_path
from models.loader import load_target
from models.saving import save_drafter
from models.tiled_decoder import suits
from models.tiles import has_operators
from speculative.edge.config import EdgeConfig
from speculative.edge.drafting import EdgeModel
from speculative.edge.opening import Server
from speculative.edge.session import Rows
from speculative.edge_export import export_edge
from speculative.engine import Engine
from speculative.request import Request, SamplingParams
from tests.integration.compiling import FIXTURE, load
from tests.speculative.conftest import MOA_KINDS, random_moa

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs g++"),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of compiled graphs: the target's are the same for all drafters. What runs them is taken over where it has been built."""
    folder = tmp_path_factory.mktemp("cache")
    built = runner_path(default_cache())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        own = runner_path(default_cache())
    if built.exists():
        own.parent.mkdir(parents=True)
        shutil.copyfile(built, own)
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of a kind that operators are not for: its layers and its head are compiled by PyTorch."""
    folder = tmp_path_factory.mktemp("other")
    sizes = {"vocab_size": 150, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 16}
    torch.manual_seed(3)
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.1)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(
    scope="module",
    # What drafts a block from a vocabulary of its own is compiled by PyTorch beside operators too; the others are not.
    params=[("graphs", "ablation"), ("operators", "entry and block"), ("operators", "paired block and vocabulary")],
    ids=" of ".join,
)
def engines(
    request: pytest.FixtureRequest, cache: Path, other: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Engine]]:
    """An engine on compiled graphs, or on operators, with a drafter of some kind, and one without."""
    threads, folder = torch.get_num_threads(), tmp_path_factory.mktemp("drafter")
    compiled, kind = request.param
    model = other if compiled == "graphs" else FIXTURE / "target"
    save_drafter(random_moa(model, **MOA_KINDS[kind]), folder, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        pair = {"model": str(model), "drafter": str(folder)}
        yield load("on", num_threads=1, **pair), load("off", num_threads=1, **pair)
    torch.set_num_threads(threads)


def answers(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> tuple[list[list[int]], int]:
    """What an engine answers to prompts sent together, and how many drafted tokens were accepted."""
    answers: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    accepted: dict[str, int] = {}
    for number, prompt in enumerate(prompts):
        engine.add(Request(str(number), tuple(prompt), params))
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id].extend(output.new_token_ids)
            accepted[output.request_id] = sum(number * times for number, times in enumerate(output.stats.acceptance_histogram))
    return list(answers.values()), sum(accepted.values())


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 5}, {"temperature": 1.3, "top_k": 40, "seed": 6}]
)
@pytest.mark.parametrize("count", [1, 3])
def test_compiled_graphs_give_the_same_tokens(
    engines: tuple[Engine, Engine], sampling: dict[str, float], speculative: bool, count: int
) -> None:
    compiled, plain = engines
    assert compiled.target.compiled and compiled.compiled
    assert not plain.target.compiled and not plain.compiled
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [7], [2, 7, 1, 8] * 20][:count]
    params = SamplingParams(24, speculative=speculative, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    assert answers(compiled, prompts, params) == answers(plain, prompts, params)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_compiled_graphs_verify_predictions_and_score_tokens(engines: tuple[Engine, Engine], temperature: float) -> None:
    compiled, plain = engines
    prompt, beside = [3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8] * 20
    params = SamplingParams(80, temperature=temperature, seed=2, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    expected, scores = scored(plain, Request("r", tuple(prompt), params))
    prediction = (*expected[:30], 5, 5, *expected[34:])
    assert scored(compiled, Request("r", tuple(prompt), params, prediction=prediction)) == (
        expected,
        pytest.approx(scores, abs=1e-3),
    )
    compiled.add(Request("beside", tuple(beside), SamplingParams(48, temperature=0.0, ignore_eos=True)))
    assert scored(compiled, Request("r", tuple(prompt), params, prediction=prediction))[0] == expected


def scored(engine: Engine, request: Request) -> tuple[list[int], list[float]]:
    """A request's tokens, and the log-probabilities of its text."""
    tokens: list[int] = []
    scores: list[float] = []
    engine.add(request)
    while engine.has_work:
        for output in engine.step():
            if output.request_id == request.request_id:
                tokens += output.new_token_ids
                scores += [each.logprob for each in (*(output.prompt_logprobs or ()), *(output.logprobs or ()))]
    return tokens, scores


def test_graphs_take_inputs_that_are_not_dense(engines: tuple[Engine, Engine]) -> None:
    head, size = engines[0].compiled["head"], engines[0].target.config.hidden_size
    sliced = torch.randn(4, 2 * size)[:, :size]
    assert torch.equal(head([sliced])[0], head([sliced.clone()])[0])


def test_a_second_engine_takes_the_graphs_from_the_cache(
    engines: tuple[Engine, Engine], other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculative.packages._compile_apart", lambda *_: pytest.fail("compiled again"))
    assert load("on", num_threads=1, model=str(other), drafter="none").target.compiled


def test_graphs_are_made_for_the_threads_of_this_process(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    sizes = {"vocab_size": 150, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(tmp_path)  # of which the head alone is compiled
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert load("on", model=str(tmp_path), drafter="none").target.compiled
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not has_operators(), reason="needs an x86 CPU with AVX2")
def test_a_decoder_by_tiles_scores_as_float32_does(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    threads = torch.get_num_threads()
    settings = {"num_threads": 1, "drafter": "none"}
    tiled, exact = load("on", dtype="bfloat16", **settings), load("off", **settings)
    torch.set_num_threads(threads)
    assert suits(load_target(FIXTURE / "target", dtype=torch.bfloat16)[0]) and tiled.target.compiled
    request = Request("r", tuple([3, 1, 4, 1, 5, 9, 2, 6] * 6), SamplingParams(1, temperature=0.0, prompt_logprobs=0))
    assert scored(tiled, request)[1][:-1] == pytest.approx(scored(exact, request)[1][:-1], abs=0.1)
    together = answers(tiled, [[3, 1, 4], [7], [2, 7, 1, 8] * 9], SamplingParams(24, temperature=0.0, speculative=False))[0]
    for prompt, expected in zip([[3, 1, 4], [7], [2, 7, 1, 8] * 9], together, strict=True):
        assert answers(tiled, [prompt], SamplingParams(24, temperature=0.0, speculative=False))[0] == [expected]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_texts_grow_to_the_models_last_position(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    save_drafter(random_moa(**MOA_KINDS["block"]), tmp_path, dtype=torch.float32)
    engine = load("on", dtype=dtype, num_threads=1, drafter=str(tmp_path), max_model_len=None, draft_min_reach=0.0)
    length = engine.info.max_model_len
    assert length == engine.target.config.max_position_embeddings
    # Trees of ever the same depth reach past the end.
    prompts = [[3, 1, 4, 1, 5] * 20, [2, 7] * ((length - 20) // 2), [7, 8, 9] * ((length - 11) // 3)]
    tokens, _ = answers(engine, prompts, SamplingParams(ignore_eos=True, temperature=0.0, max_tokens=None))
    assert [len(prompt) + len(answer) for prompt, answer in zip(prompts, tokens, strict=True)] == [length] * 3


def test_an_edge_drafts_the_same_trees(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    save_drafter(random_moa(**MOA_KINDS["entry and block"]), tmp_path / "drafter", dtype=torch.float32)
    export_edge(str(FIXTURE / "target"), str(tmp_path / "drafter"), tmp_path / "edge", dtype="float32")
    server, threads = Server("ws://127.0.0.1:1"), torch.get_num_threads()
    models = [EdgeModel.load(EdgeConfig(server, tmp_path / "edge", compile=each, dtype="float32")) for each in ("on", "off")]
    assert threads == torch.get_num_threads()
    codec, prompt = models[0].codec("bfloat16"), tuple(range(3, 40))
    generator = torch.Generator().manual_seed(0)
    memory = torch.randn(len(prompt) - 1, codec.rows.numbers, generator=generator)
    newest = b"" if codec.newest is None else codec.newest.encode(torch.randn(1, codec.newest.numbers, generator=generator))
    for temperature in (0.0, 0.9):
        request = Request("r", prompt, SamplingParams(40, temperature=temperature, seed=3))
        texts = [model.begin(request, 100) for model in models]
        for text in texts:
            text.remember([Rows(0, codec.rows.encode(memory), newest)], codec)
        for nodes in (5, 32):
            one, other = (text.draft(replace(models[0].largest, nodes=nodes), 32).tree for text in texts)
            assert one == other and len(one.tokens) == nodes
        for model, text in zip(models, texts, strict=True):
            model.end(text)
