import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.cli import cli
from benchmarks import watching
from benchmarks.prompts import PromptError
from benchmarks.watching import EXTRA, RECORDING, WITHOUT, WatchingResult, questions, recorder_seconds
from speculative.request import RequestOutput, RequestStats

SMALL = ["bench", "watching", "--compile", "off", "--num-threads", "1", "--rounds", "2"]
SMALL += ["--num-requests", "2", "--concurrency", "2", "--max-tokens", "6"]


def test_ratios_pair_rounds_and_recording_is_a_share_of_a_tokens_time() -> None:
    speeds = {WITHOUT: [100.0, 50.0, 200.0], RECORDING: [99.0, 50.0, 196.0]}
    seconds = {WITHOUT: [0.01, 0.02, 0.01], RECORDING: [0.0101, 0.02, 0.01]}
    result = WatchingResult(8, speeds, seconds, recorder_seconds=1e-6, tokens_per_request=64, scrape_seconds=0.002)
    figures = result.as_dict()
    assert figures["speed_ratios"]["recording/without"]["median"] == 0.99
    assert figures["cpu_ratios"]["recording/without"]["median"] == 1.0
    assert EXTRA not in figures["tokens_per_second"]
    assert "extras/recording" not in figures["speed_ratios"]
    assert result.recorder_share == pytest.approx(1e-4)


def test_recording_is_measured_by_replaying_outputs() -> None:
    stats = [RequestStats(prompt_tokens=1, completion_tokens=n, first_token_time=1.0, last_token_time=float(n)) for n in (1, 2)]
    outputs = [RequestOutput("r", (1,), "", "stop" if one is stats[-1] else None, one) for one in stats]
    assert recorder_seconds([outputs] * 20) > 0


def test_questions_are_first_turns(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}\n')
    assert questions(path, 2, seed=0) == ["u", "u"]
    path.write_text('{"turns": ["first", "second"]}\n')
    assert questions(path, 1, seed=0) == ["first"]
    path.write_text('{"messages": []}\n')
    with pytest.raises(PromptError, match="no question"):
        questions(path, 1, seed=0)


@pytest.mark.parametrize("extra", ["[1]", "{"])
def test_extras_that_are_no_object_are_refused(extra: str) -> None:
    result = CliRunner().invoke(cli, ["bench", "watching", "--extra", extra])
    assert result.exit_code == 2
    assert "--extra" in result.stderr


@pytest.mark.integration
def test_the_command_measures_three_ways(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    result = CliRunner().invoke(cli, [*SMALL, "--extra", '{"logprobs": true}', "--json", str(path)])
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text())
    assert {arm: len(speeds) for arm, speeds in figures["tokens_per_second"].items()} == {WITHOUT: 2, RECORDING: 2, EXTRA: 2}
    assert figures["tokens_per_request"] == 6
    assert figures["provenance"]["commit"]


@pytest.mark.integration
def test_an_interrupt_leaves_figures_of_the_rounds_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    async def interrupted(*given: Any) -> tuple[float, float]:
        nonlocal asked
        asked += 1
        if asked == 2 + 2 + 2:  # of the second round one way is done, after those that warm up
            raise KeyboardInterrupt
        return await round_(*given)

    round_ = watching._round
    monkeypatch.setattr(watching, "_round", interrupted)
    path = tmp_path / "result.json"
    done = CliRunner().invoke(cli, [*SMALL, "--json", str(path)])
    assert done.exit_code == 1 and "it was interrupted after 1 of 2 rounds" in done.output
    figures = json.loads(path.read_text())
    assert {arm: len(speeds) for arm, speeds in figures["tokens_per_second"].items()} == {WITHOUT: 1, RECORDING: 1}
    assert figures["recorder_microseconds_per_token"] > 0 and figures["scrape_milliseconds"] > 0


@pytest.mark.integration
def test_extras_that_the_server_refuses_are_told() -> None:
    result = CliRunner().invoke(cli, [*SMALL, "--extra", '{"nonsense": 1}'])
    assert result.exit_code == 1
    assert "nonsense" in result.stderr
