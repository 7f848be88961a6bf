"""How long streams wait while a prompt is read beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.fairness import Arrival, Stream, StreamFigures, figures, with_longer_context
from models.loader import BUNDLED, load_target, load_tokenizer
from tests.speculative.conftest import N0


def stream(*gaps: float) -> Stream:
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    return Stream(times)


def test_gaps_count_that_were_open_meanwhile() -> None:
    one = stream(1, 1, 1, 5, 1, 1)
    assert one.gaps(3.5, 7.0) == [5]
    assert one.gaps(2.5, 8.5) == [1, 5, 1]


def test_a_streams_longest_gap_is_told_in_its_own_median() -> None:
    # Both have settled at 1; the prompt comes at 4.5 and has its first token at 9.
    slow, quick = stream(3, 2, 6, 2, 2), stream(0.5, 0.5, 1, 1, 1, 1, 1, 4, 1)
    of_slow, of_quick = figures([slow, quick], 1.0, 4.5, 9.0)
    assert of_slow == StreamFigures(3, 3, 6)
    assert of_quick == StreamFigures(1, 1, 4)
    arrival = Arrival(100, 4.5, 2.0, (of_slow, of_quick))
    assert arrival.worst is of_quick and arrival.as_dict()["ratio"] == 4
    assert "4.00x" in arrival.line() and "4.50 s, 2.00 alone" in arrival.line()


def test_a_model_with_too_short_a_context_is_copied_with_a_longer_one(tmp_path: Path) -> None:
    length = json.loads((N0 / "target" / "config.json").read_text())["max_position_embeddings"]
    assert with_longer_context(N0 / "target", length, tmp_path) == N0 / "target"
    longer = with_longer_context(N0 / "target", length + 1000, tmp_path)
    assert load_target(longer, dtype=torch.float32)[0].config.max_position_embeddings == length + 1000
    assert load_tokenizer(with_longer_context(BUNDLED["target"], 4608, tmp_path)) is not None


@pytest.mark.integration
def test_a_real_server_is_measured(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from app.cli import cli

    out = tmp_path / "fairness.json"
    few = ["--streams", "2", "--prompt-tokens", "600", "--repeats", "1", "--settling", "0.3", "--compile", "off"]
    done = CliRunner().invoke(cli, ["bench", "fairness", *few, "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert "No stream waited longer than" in done.output
    result = json.loads(out.read_text())
    (arrival,) = result["arrivals"]
    assert len(arrival["streams"]) == 2 and abs(arrival["prompt_tokens"] - 600) < 60
    assert arrival["ratio"] == result["worst_ratio"] == max(one["longest"] / one["median"] for one in arrival["streams"])
    assert result["provenance"]["command"]
