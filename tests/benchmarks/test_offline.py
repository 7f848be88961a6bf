import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from app.cli import cli
from app.commands import tables
from benchmarks import decoding
from benchmarks.decoding import Decoded
from benchmarks.machine import provenance
from benchmarks.offline import PLAIN, SPECULATIVE, TRANSFORMERS, OfflineResult, run_offline, spread
from benchmarks.prompts import Prompt
from speculative.config import EngineConfig
from speculative.engine import Engine
from speculative.loading import load_engine
from speculative.request import RequestStats
from tests.speculative.conftest import N0

CONFIG = EngineConfig(
    model=str(N0 / "target"),
    drafter=str(N0 / "drafter"),
    dtype="float32",
    draft_policy="fixed",
    max_num_seqs=1,
    num_threads=1,
    compile="off",
)


def test_a_run_compares_three_ways_and_adds_up() -> None:
    prompts = [Prompt("a", (1, 5, 9)), Prompt("b", (7, 8)), Prompt("a", (3,))]
    reference = AutoModelForCausalLM.from_pretrained(N0 / "target")
    result = run_offline(load_engine(CONFIG), CONFIG, prompts, max_tokens=12, reference=reference)
    assert result.identical(SPECULATIVE, PLAIN) == result.identical(PLAIN, TRANSFORMERS) == 3
    acceptance = result.acceptance()
    lengths = sum(len(run.token_ids) for run in result.runs[SPECULATIVE])
    verifications = acceptance.target_passes - len(prompts)  # each prompt has a pass of its own
    assert acceptance.tau == pytest.approx(1 + acceptance.accepted / verifications)
    assert lengths <= len(prompts) + acceptance.accepted + verifications
    document = json.loads(result.to_json())
    assert set(document["tau_by_source"]) == {"a", "b"}
    by_source = result.ratios_by_source(SPECULATIVE, PLAIN)
    first, second, third = result.ratios(SPECULATIVE, PLAIN)
    assert by_source == {"a": [first, third], "b": [second]}
    assert document["ratios_by_source"]["speculative/plain"] == {source: spread(ratios) for source, ratios in by_source.items()}
    assert set(document["ratios"]) == {"speculative/plain", "plain/transformers", "speculative/transformers"}
    assert document["provenance"]["torch"]


def test_conversations_are_read_on_and_compared_as_wholes() -> None:
    config = replace(CONFIG, prefix_cache_tokens=256)
    first, other = tuple(range(3, 60)), tuple(range(70, 5, -1))
    conversations = {"a": [first, (*first, 9, 8, 7), (*first, 9, 8, 7, *range(20))], "b": [other]}
    prompts = [Prompt("s", ids, conversation=name) for name, turns in conversations.items() for ids in turns]
    reference = AutoModelForCausalLM.from_pretrained(N0 / "target")
    result = run_offline(load_engine(config), config, prompts, max_tokens=12, reference=reference)
    assert result.identical(SPECULATIVE, PLAIN) == result.identical(PLAIN, TRANSFORMERS) == 4
    assert result.compared == [[0, 1, 2], [3]]
    (ratio, _), runs = result.ratios(SPECULATIVE, PLAIN), result.runs
    speeds = [sum(len(each.token_ids) for each in runs[way][:3]) / sum(each.seconds for each in runs[way][:3]) for way in runs]
    assert ratio == pytest.approx(speeds[list(runs).index(SPECULATIVE)] / speeds[list(runs).index(PLAIN)])
    for way in (PLAIN, SPECULATIVE):
        cached = [run.stats.cached_tokens for run in result.runs[way] if run.stats is not None]
        assert cached == [0, 48, 48, 0]  # whole blocks of 16


def test_an_interrupt_leaves_figures_of_the_prompts_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, asked = decoding.decode, list[Prompt]()

    def interrupted(engine: Engine, prompt: Prompt, *more: Any, **named: Any) -> Decoded:
        asked.append(prompt)
        if len(asked) == 2 + 2 * 2 + 2:  # of the third prompt one way is done, after those that warm up
            raise KeyboardInterrupt
        return decode(engine, prompt, *more, **named)

    monkeypatch.setattr("benchmarks.offline.decode", interrupted)
    options = ["--num-prompts", "4", "--max-tokens", "4", "--no-transformers", "--drafter", "ngram", "--num-threads", "1"]
    path = tmp_path / "r.json"
    done = CliRunner().invoke(cli, ["bench", "offline", *options, "--compile", "off", "--dtype", "float32", "--json", str(path)])
    assert done.exit_code == 1 and "it was interrupted after 2 of 4 prompts" in done.output
    told = json.loads(path.read_text())
    assert told["prompts"] == 2 and told["identical_outputs"] == {"speculative/plain": 2}


@pytest.mark.parametrize("command", ["offline", "predictions", "answers"])
def test_a_bad_file_of_prompts_is_told_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("speculative.loading.load_engine", lambda config: pytest.fail("it takes minutes"))
    path = tmp_path / "bad.jsonl"
    path.write_text("no JSON\n")
    done = CliRunner().invoke(cli, ["bench", command, "--prompts", str(path)])
    assert done.exit_code == 1 and "line 1" in done.output


def test_spread_is_median_and_quartiles() -> None:
    assert spread([3.0]) == {"median": 3.0, "p25": 3.0, "p75": 3.0}
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == {"median": 3.0, "p25": 2.0, "p75": 4.0}
    assert spread([1.0, 3.0]) == {"median": 2.0, "p25": 1.5, "p75": 2.5}, "not what nobody has measured"


def test_sources_are_told_as_the_file_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    run = Decoded((1, 2), 1.0, 0.5, 1, RequestStats())
    settings = {"model": "[/b] x", "dtype": "float32", "drafter": "moa", "max_tokens": 8}
    result = OfflineResult(provenance(), settings, [Prompt("[/maths] :cat:", (1,))], {PLAIN: [run], SPECULATIVE: [run]})
    tables.print_offline(result)
    told = capsys.readouterr().out
    assert "[/maths] :cat: 1.00" in told and "[/b] x, float32" in told


def test_answers_that_were_cut_off_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """A small model's rambling is easily drafted: what is gained on answers that end is told beside what is gained on all."""
    settings = {"model": "x", "dtype": "float32", "drafter": "moa", "max_tokens": 3}
    lengths = {PLAIN: [(2, 4.0), (3, 9.0), (2, 6.0)], SPECULATIVE: [(2, 2.0), (3, 1.0), (3, 1.0)]}
    runs = {way: [Decoded((1,) * count, took, 0.0, 0, RequestStats()) for count, took in of] for way, of in lengths.items()}
    result = OfflineResult(provenance(), settings, [Prompt("a", (number,)) for number in range(3)], runs)
    ratios = json.loads(result.to_json())
    assert ratios["ratios"]["speculative/plain"]["median"] == 9.0
    assert ratios["ratios_of_ended"] == {"speculative/plain": {"compared": 1, "median": 2.0, "p25": 2.0, "p75": 2.0}}
    tables.print_offline(result)
    assert "of the 1 of 3 whose answers ended by themselves: 2.00x" in " ".join(capsys.readouterr().out.split())


def test_a_ratio_of_nothing_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    run = Decoded((1,), 1.0, 0.0, 0, RequestStats())
    settings = {"model": "x", "dtype": "float32", "drafter": "moa", "max_tokens": 8}
    result = OfflineResult(provenance(), settings, [Prompt("a", (1,))], {PLAIN: [run], SPECULATIVE: [run]})
    assert json.loads(result.to_json(), parse_constant=pytest.fail)["decode_ratio"] is None
    tables.print_offline(result)
    assert "nan" not in capsys.readouterr().out


def test_the_command_prints_tables_and_writes_json(tmp_path) -> None:
    result = CliRunner().invoke(
        cli,
        [
            "bench",
            "offline",
            "--compile",
            "off",
            "--num-prompts",
            "2",
            "--max-tokens",
            "6",
            "--no-transformers",
            "--drafter",
            "ngram",
            "--dtype",
            "float32",
            "--num-threads",
            "1",
            "--json",
            str(tmp_path / "out" / "r.json"),
        ],
    )
    assert result.exit_code == 0, result.output
    assert re.search(r"speculative\s+│\s+\d+", result.output)
    assert json.loads((tmp_path / "out" / "r.json").read_text())["prompts"] == 2


def test_figures_that_the_disk_does_not_take_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Decoded((1, 2), 1.0, 0.5, 1, RequestStats())
    settings = {"model": "x", "dtype": "float32", "drafter": "moa", "max_tokens": 8}
    result = OfflineResult(provenance(), settings, [Prompt("a", (1,))], {PLAIN: [run], SPECULATIVE: [run]})

    def fill(*_: object, **__: object) -> OfflineResult:
        (tmp_path / "folder").write_text("in the way")
        return result

    monkeypatch.setattr("benchmarks.offline.run_offline", fill)
    options = ["--num-prompts", "1", "--no-transformers", "--drafter", "none", "--compile", "off", "--num-threads", "1"]
    done = CliRunner().invoke(cli, ["bench", "offline", *options, "--json", str(tmp_path / "folder" / "r.json")])
    assert "the result stands above instead" in str(done.exception) and '"tau": 1.0' in done.stdout


def test_a_missing_prompt_file_is_named_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculative.loading.load_engine", lambda _: pytest.fail("loaded a model"))
    result = CliRunner().invoke(cli, ["bench", "offline", "--prompts", "nowhere.jsonl"])
    assert result.exit_code == 2
    assert "nowhere.jsonl" in result.output and "does not exist" in result.output
