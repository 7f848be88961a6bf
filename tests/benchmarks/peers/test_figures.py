"""Ratios of speeds, and what a report makes of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.peers.figures import best_assistance, figures, ratios, spread
from benchmarks.peers.measuring import Results
from benchmarks.peers.report import as_dict, print_results, ratio, write
from benchmarks.peers.ways import Answered

SETTINGS = {"model": "bundled", "dtype": "bfloat16", "threads": 2, "num_prompts": 3}


def answered(tokens: int, seconds: float, text: str = "secret") -> Answered:
    return Answered((text,), tokens, seconds)


@pytest.fixture
def results() -> Results:
    """Of three prompts: ours 20, 40 and 10 tokens a second; generate 10 each; lookup 5, 20 and 10; assisted failed at the third."""
    return Results(
        {
            (1, "ours"): {0: answered(20, 1), 1: answered(20, 0.5), 2: answered(10, 1)},
            (1, "transformers"): {0: answered(10, 1), 1: answered(20, 2), 2: answered(5, 0.5, "other")},
            (1, "transformers-lookup (2)"): {0: answered(10, 2), 1: answered(20, 1), 2: answered(10, 1)},
            (1, "transformers-assisted"): {0: answered(16, 1), 1: answered(16, 1)},
            (8, "ours"): {0: Answered(("a", "b"), 30, 1.0)},
            (8, "transformers"): {0: Answered(("a", "c"), 10, 2.0)},
        },
        ["transformers-assisted: out of memory (1 at once)"],
        idle_cpu=0.5,
        busy=10.0,
    )


def test_a_ratio_is_of_speeds_group_by_group(results: Results) -> None:
    runs = results.runs
    assert ratios(runs[1, "ours"], runs[1, "transformers"]) == [2.0, 4.0, 1.0]
    assert ratios(runs[1, "ours"], runs[1, "transformers-lookup (2)"]) == [4.0, 2.0, 1.0]
    assert ratios(runs[8, "ours"], runs[8, "transformers"]) == [6.0]


def test_groups_that_only_one_of_both_answered_and_empty_answers_count_not(results: Results) -> None:
    runs = results.runs
    assert ratios(runs[1, "ours"], runs[1, "transformers-assisted"]) == [1.25, 2.5]
    assert ratios({0: answered(0, 1), 1: answered(4, 1)}, {0: answered(3, 1), 1: answered(0, 1)}) == []


def test_figures_are_medians_with_quartiles_and_speed_over_all_tokens(results: Results) -> None:
    found = figures(results)
    assert found[1, "ours"].tokens_per_second == 50 / 2.5
    assert found[1, "transformers"].tokens_per_second == 35 / 3.5
    assert found[1, "transformers"].ours_over == {"median": 2.0, "p25": 1.5, "p75": 3.0}
    assert (found[1, "transformers"].identical, found[1, "transformers"].texts) == (2, 3)
    assert (found[8, "transformers"].identical, found[8, "transformers"].texts) == (1, 2)
    assert found[1, "transformers-assisted"].groups == 2


def test_quartiles_of_few_groups_stay_among_them() -> None:
    assert spread([1.0, 5.0]) == {"median": 3.0, "p25": 2.0, "p75": 4.0}
    assert spread([3.0]) == {"median": 3.0, "p25": 3.0, "p75": 3.0}


def test_without_ours_there_is_no_ratio(results: Results) -> None:
    del results.runs[1, "ours"]
    assert figures(results)[1, "transformers"].ours_over is None


def test_the_best_assistance_is_that_which_ours_is_the_least_ahead_of(results: Results) -> None:
    found = figures(results)
    assert best_assistance(found, 1) == "transformers-assisted"  # 1.875 against 2
    assert best_assistance(found, 8) is None
    del found[1, "transformers-assisted"]
    assert best_assistance(found, 1) == "transformers-lookup (2)"


def test_our_own_row_has_no_ratio(results: Results) -> None:
    found = figures(results)
    assert ratio(found[1, "ours"], "ours") == "–"
    assert ratio(found[1, "transformers"], "transformers") == "2.00x (1.50–3.00)"


def test_json_has_every_run_and_no_text(results: Results) -> None:
    document = as_dict(results, SETTINGS, ["a note"])
    assert "secret" not in json.dumps(document) and document["notes"] == ["a note"]
    assert len(document["runs"]) == sum(map(len, results.runs.values()))
    assert document["idle_cores"] == 0.05 and document["best_assistance"] == {1: "transformers-assisted", 8: None}
    assert document["failures"] == ["transformers-assisted: out of memory (1 at once)"]


def test_the_table_tells_ratios_best_assistance_notes_and_failures(
    results: Results, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    print_results(results, SETTINGS, ["Left out: llama.cpp"])
    said = capsys.readouterr().out
    assert re.search(r"transformers +│ +10\.0 │ +2\.00x \(1\.50–3\.00\) │ +2 of 3", said)
    assert "bundled, bfloat16, 2 threads, 3 prompts, greedy, 8 at once" in said
    assert "transformers' best way with drafts is transformers-assisted: ours over it 1.88x" in said
    assert "Left out: llama.cpp" in said and "Servers that waited used 5.0% of a core together." in said
    assert "Failed: transformers-assisted: out of memory (1 at once)" in said


def test_figures_and_a_picture_are_written(results: Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'moaserve[eval]'")
    paths = write(results, SETTINGS, [], tmp_path / "out")
    assert [path.name for path in paths] == ["results.json", "peers.png"]
    assert json.loads(paths[0].read_text())["provenance"]["torch"]
    assert paths[1].read_bytes().startswith(b"\x89PNG")
