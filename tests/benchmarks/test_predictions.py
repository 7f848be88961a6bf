"""Edits of predictions, and what is counted."""

import random

from typer.testing import CliRunner

from app.cli import cli
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


def test_more_edits_than_an_answer_has_tokens_are_refused() -> None:
    result = CliRunner().invoke(cli, ["bench", "predictions", "--max-tokens", "8", "--edits", "2", "--edits", "9"])
    assert (result.exit_code, "--edits 9" in result.stderr) == (2, True)
