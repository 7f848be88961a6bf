"""Edits of predictions, and what is counted."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.cli import cli
from benchmarks.decoding import Decoded, decode
from benchmarks.predictions import edited


def test_as_many_places_are_wrong_as_told() -> None:
    answer = list(range(1000, 1400))
    assert edited(answer, 0, random.Random(1), 10) == answer
    for seed in range(20):
        tokens = edited(answer, 3, random.Random(seed), 10)
        assert tokens == edited(answer, 3, random.Random(seed), 10)
        kept = [token for token in tokens if token >= 1000]
        assert 1 <= len(answer) - len(kept) + len(tokens) - len(kept) <= 3 * 12
        assert kept == sorted(kept)


def test_the_command_tells_passes_with_and_without() -> None:
    arguments = ["bench", "predictions", "--num-prompts", "1", "--max-tokens", "120", "--edits", "0", "--dtype", "float32"]
    # By what steps cost the policy may leave drafts out, and steps without are not counted.
    result = CliRunner().invoke(cli, [*arguments, "--compile", "off", "--draft-policy", "fixed"])
    assert result.exit_code == 0, result.output
    # 1 + 32, 1 + 64, and the rest.
    assert "0 edits: 3 passes where the drafter alone takes" in result.stdout
    refused = CliRunner().invoke(cli, ["bench", "predictions", "--drafter", "none", "--compile", "off"])
    assert (refused.exit_code, "nothing is drafted" in refused.stderr) == (1, True)


def test_an_interrupt_leaves_figures_of_the_prompts_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def interrupted(*given: Any, **named: Any) -> Decoded:
        nonlocal asked
        asked += 1
        if asked == 2 * 3 + 3:  # the third prompt's last
            raise KeyboardInterrupt
        return decode(*given, **named)

    monkeypatch.setattr("benchmarks.predictions.decode", interrupted)
    path = tmp_path / "r.json"
    options = ["--num-prompts", "4", "--max-tokens", "8", "--edits", "0", "--edits", "1", "--edits", "1", "--json", str(path)]
    done = CliRunner().invoke(cli, ["bench", "predictions", *options, "--compile", "off", "--num-threads", "1"])
    assert done.exit_code == 1 and "it was interrupted after 2 of 4 prompts" in done.output
    told = json.loads(path.read_text())
    assert [(each["edits"], each["prompts"], each["tokens"]) for each in told["figures"]] == [(0, 2, 16), (1, 2, 16)]
    assert told["dtype"] != "auto" and told["drafter"] != "auto"


def test_more_edits_than_an_answer_has_tokens_are_refused() -> None:
    result = CliRunner().invoke(cli, ["bench", "predictions", "--max-tokens", "8", "--edits", "2", "--edits", "9"])
    assert (result.exit_code, "--edits 9" in result.stderr) == (2, True)
