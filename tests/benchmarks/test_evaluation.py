"""Drafters side by side: figures that add up, intervals that hold, pictures that are drawn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from app.cli import cli
from app.commands import tables
from benchmarks.decoding import Decoded, decode
from benchmarks.evaluation import ALL, Case, Run, SentMemory, by_source, evaluate, figures
from benchmarks.prompts import Prompt
from speculative.config import EngineConfig, MemoryFormat
from speculative.drafters.moa import MoADrafter
from speculative.drafters.wrapper import innermost
from speculative.engine import Engine
from speculative.errors import EngineLoadError
from speculative.loading import load_engine
from speculative.placement import torch_dtype
from speculative.remote.memory_codec import MemoryCodec
from speculative.request import RequestStats, SamplingParams
from tests.speculative.conftest import N0

CONFIG = EngineConfig(
    model=str(N0 / "target"),
    drafter=str(N0 / "drafter"),
    dtype="float32",
    max_num_seqs=1,
    num_threads=1,
    compile="off",
    draft_policy="fixed",
    draft_lookup=0,
)
PROMPTS = [Prompt("a", (1, 5, 9)), Prompt("b", (7, 8)), Prompt("a", (3, 3, 3))]


def run(source: str, seconds: float, histogram: tuple[int, ...]) -> Run:
    """A speculative run of 21 tokens, with a plain one of 41 seconds that takes one for each token."""
    drafts = sum(histogram)
    accepted = sum(depth * times for depth, times in enumerate(histogram))
    stats = RequestStats(
        num_drafts=drafts, num_accepted_draft_tokens=accepted, num_target_calls=drafts + 1, acceptance_histogram=histogram
    )
    speculative = Decoded(tuple(range(21)), seconds + 1, seconds, 18, stats)
    return Run(source, speculative, Decoded(tuple(range(41)), 41.0, 40.0, 40, None), draft_seconds=6.0)


def test_figures_mean_what_they_say() -> None:
    each = figures([run("a", 10.0, (2, 0, 3))])
    assert each.tau == 1 + 6 / 5 and each.tau_low == each.tau_high == each.tau
    assert each.by_depth == (3 / 5, 3 / 5)
    assert each.tokens_per_second == 21 / 11
    assert each.decode_ratio == pytest.approx((18 / 10) / 1.0)
    assert each.end_to_end == pytest.approx((21 / 11) / 1.0)
    assert each.passes_per_token == 6 / 21
    assert each.draft_cost == pytest.approx(6.0 / 4 / 1.0)
    assert each.identical == 0.0


def test_intervals_cover_what_prompts_differ_in() -> None:
    alike = figures([run("a", 10.0, (1, 1)) for _ in range(20)])
    different = figures([run("a", 10.0, (2, 0) if n % 2 else (0, 2)) for n in range(20)])
    assert alike.tau_low == alike.tau == alike.tau_high == 1.5
    assert different.tau == 1.5
    assert 1.2 < different.tau_low < 1.45 and 1.55 < different.tau_high < 1.8


def test_no_figure_is_cut_short_in_a_narrow_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    each = figures([run("a", 10.0, (2, 0) if n % 2 else (0, 2)) for n in range(20)])
    tables.print_evaluation({Case("ours", "chain", "temperature 1"): {ALL: each, "function calls": each}})
    table, _, _ = capsys.readouterr().out.partition("accepted at depth")
    assert "…" not in table


def test_drafters_meet_the_same_prompts_in_every_way() -> None:
    configs = {"moa": CONFIG, "copies": replace(CONFIG, drafter="ngram")}
    asked: dict[str, Any] = {"shape_names": ["tree", "chain"], "temperatures": [0.0, 1.0]}
    results = dict(evaluate(load_engine, configs, PROMPTS, **asked, max_tokens=10, seed=3))
    assert [(case.drafter, case.shape, case.sampling) for case in results] == [
        (drafter, shape, sampling)
        for drafter in ("moa", "copies")
        for shape in ("tree", "chain")
        for sampling in ("greedy", "temperature 1")
    ]
    for case, runs in results.items():
        pooled = by_source(runs)
        assert set(pooled) == {ALL, "a", "b"} and pooled[ALL].prompts == 3 and pooled["a"].prompts == 2
        assert pooled[ALL].identical == 1.0, case
        assert pooled[ALL].tau_low <= pooled[ALL].tau <= pooled[ALL].tau_high


@pytest.mark.parametrize("format", ["bfloat16", "int8", "int4"])
def test_drafts_are_made_from_memory_as_it_arrives(format: MemoryFormat) -> None:
    """CA's rows are those of an engine that sends nothing, less what the format loses; SA's, which an edge has, are the same."""
    kept: list[list[Tensor]] = []
    for sends in (False, True):
        engine = load_engine(CONFIG)
        assert engine.drafter is not None
        if sends:
            engine.drafter = SentMemory(engine.drafter, format)
        decode(engine, PROMPTS[0], SamplingParams(max_tokens=8, temperature=0.0))
        kept.append([cache.data[0, cache.scratch : cache.scratch + 9] for cache in engine.drafter.caches])
    drafter = innermost(engine.drafter)
    assert isinstance(drafter, MoADrafter)
    codec = MemoryCodec.of(drafter.network.moa.config, format)
    (tokens, memory, *_), (tokens_here, memory_arrived, *_) = kept
    assert torch.equal(tokens_here, tokens) and memory.abs().sum() > 0
    assert torch.equal(memory_arrived, codec.rows.decode(codec.rows.encode(memory)))
    assert not torch.equal(memory_arrived, memory)


def test_formats_of_memory_are_compared_side_by_side() -> None:
    asked: dict[str, Any] = {"shape_names": ["tree"], "temperatures": [0.0], "max_tokens": 10, "seed": 3}
    results = dict(evaluate(load_engine, {"moa": CONFIG}, PROMPTS, **asked, memory_formats=[None, "int8"]))
    assert [case.drafter for case in results] == ["moa", "moa (int8 memory)"]
    assert all(by_source(runs)[ALL].identical == 1.0 for runs in results.values()), "memory changes drafts, never the answer"
    with pytest.raises(EngineLoadError, match="only a MoA drafter has"):
        dict(evaluate(load_engine, {"copies": replace(CONFIG, drafter="ngram")}, PROMPTS, **asked, memory_formats=["int8"]))


def invoke(*options: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["eval", *options], env={"COLUMNS": "200"})
    return result.exit_code, result.output


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_the_command_prints_a_table_and_writes_figures_and_pictures(tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"turns": [f"Tell me about {n} cups."], "source": "[/tea]"}) + "\n" for n in range(3)))
    options = "--num-prompts 2 --max-tokens 6 --dtype float32 --num-threads 1 --compile off --shape tree --temperature 0"
    code, output = invoke(
        "--drafter",
        "ngram",
        "--drafter",
        "ours=auto",
        "--prompts",
        str(questions),
        "--out",
        str(tmp_path / "out"),
        *options.split(),
    )
    assert code == 0, output
    assert "ours, tree" in output and "ngram, tree" in output and "[/tea]" in output
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {row["drafter"] for row in document["results"]} == {"ours", "ngram"}
    assert all(row["identical"] == 1.0 for row in document["results"])
    assert "cups" not in json.dumps(document), "figures, not text"
    for name in ("acceptance-length", "acceptance-by-depth", "speed"):
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


SMALL = [
    "--num-prompts",
    "1",
    "--max-tokens",
    "6",
    "--dtype",
    "float32",
    "--num-threads",
    "1",
    "--compile",
    "off",
    "--shape",
    "tree",
]


@pytest.mark.parametrize("given", ["=ngram", "ours=", "="])
def test_a_drafter_has_a_name_and_a_folder(given: str) -> None:
    code, output = invoke("--drafter", given)
    assert code == 2 and f"--drafter {given}: write NAME=FOLDER" in output


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
@pytest.mark.parametrize("problem", [KeyboardInterrupt(), EngineLoadError("no such drafter")], ids=repr)
def test_what_was_measured_is_told_where_the_rest_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Any) -> None:
    def load(config: EngineConfig) -> Engine:
        if config.drafter == "last":
            raise problem
        return load_engine(config)

    monkeypatch.setattr("speculative.loading.load_engine", load)
    code, output = invoke(
        "--drafter", "ngram", "--drafter", "last", "--out", str(tmp_path), "--temperature", "0", *SMALL, "--dtype", "auto"
    )
    assert code == 1 and f"not everything was measured: {str(problem) or 'it was interrupted'}" in output
    assert "ngram, tree" in output and (tmp_path / "speed.png").exists()
    told = json.loads((tmp_path / "results.json").read_text())
    assert {row["drafter"] for row in told["results"]} == {"ngram"}
    uncompiled = torch_dtype("auto", torch.device("cpu"), compiled=False)
    assert f"torch.{told['settings']['dtype']}" == str(uncompiled), "what auto came to"
    code, output = invoke("--drafter", "last", "--out", str(tmp_path / "none"), *SMALL)
    assert code == 1 and not (tmp_path / "none").exists()


def test_prompts_leave_room_for_their_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Prompt] = []
    monkeypatch.setattr("benchmarks.evaluation.evaluate", lambda _, __, prompts, **___: asked.extend(prompts) or iter(()))
    dialogues = [{"prompt": "word " * 900, "source": "long"}, {"prompt": "Hello", "source": "short"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in dialogues))
    options = ["--drafter", "ngram", "--prompts", str(tmp_path / "prompts.jsonl"), "--max-tokens"]
    assert invoke(*options, "1100")[0] == 0 and {each.source for each in asked} == {"long", "short"}
    asked.clear()
    assert invoke(*options, "1200")[0] == 0 and {each.source for each in asked} == {"short"}  # of 2,048 positions


def test_results_that_could_not_be_written_are_not_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = (2, f"moaserve: error: --out {tmp_path}/file: {tmp_path}/file is no folder\n")
    assert invoke("--drafter", "ngram", "--out", str(tmp_path / "file")) == refused
    for path, complaint in ((tmp_path / "file" / "x.json", "file is no folder"), (tmp_path, "is a folder, and a file is wanted")):
        result = CliRunner().invoke(cli, ["bench", "offline", "--json", str(path)], env={"COLUMNS": "200"})
        assert result.exit_code == 2 and f"--json {path}" in result.output and complaint in result.output


def test_what_cannot_be_compared_is_refused_before_anything_is_loaded() -> None:
    assert invoke("--drafter", "ngram", "--shape", "bush") == (2, "moaserve: error: --shape: tree or chain, not 'bush'\n")
    refused = (2, "moaserve: error: --memory-format: one of int8, int4, bfloat16, none, not 'int2'\n")
    assert invoke("--drafter", "auto", "--memory-format", "int2") == refused
    assert "two have the same name" in invoke("--drafter", "x/same", "--drafter", "y/same")[1]
    assert "measured beside every drafter" in invoke("--drafter", "none")[1]
