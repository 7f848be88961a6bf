import asyncio
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.cli import cli
from benchmarks import gateway
from benchmarks.gateway import DIRECT, HTTP, GatewayResult, Round
from benchmarks.loop_watch import LoopWatch

SMALL = ["bench", "gateway", "--compile", "off", "--num-threads", "1", "--rounds", "2"]
SMALL += ["--num-requests", "2", "--concurrency", "1", "--concurrency", "2", "--max-tokens", "6"]


def test_the_cost_pairs_rounds() -> None:
    speeds = {DIRECT: [100.0, 50.0, 200.0], HTTP: [99.0, 48.0, 196.0]}
    rounds = {arm: [Round(speed, 1e-5 * place, 1e-3) for place, speed in enumerate(some)] for arm, some in speeds.items()}
    result = GatewayResult({8: rounds})
    assert result.cost(8)["median"] == 0.02
    assert result.loop_seconds(8) == pytest.approx(1e-5)
    figures = result.as_dict()["concurrency"]["8"]
    assert figures["http"][2] == {
        "tokens_per_second": 196.0,
        "loop_microseconds_per_token": 20.0,
        "cpu_microseconds_per_token": 1000.0,
    }


async def test_a_watch_tells_what_held_the_loop_up_and_where() -> None:
    with LoopWatch() as watch:
        await asyncio.sleep(0.02)
        time.sleep(0.5)
        await asyncio.sleep(0.02)
    assert watch.longest.seconds > 0.4
    assert watch.longest.cpu_seconds < 0.4  # it slept
    assert watch.over >= 1
    assert watch.longest.where[0].endswith("test_a_watch_tells_what_held_the_loop_up_and_where")
    assert watch.longest.as_dict()["where"][0].startswith("benchmarks/test_gateway.py:")


@pytest.mark.integration
def test_the_command_measures_both_ways_and_disturbs(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    result = CliRunner().invoke(cli, [*SMALL, "--json", str(path)])
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text())
    assert figures["provenance"]["commit"]
    assert {at_once: (len(each["direct"]), len(each["http"])) for at_once, each in figures["concurrency"].items()} == {
        "1": (2, 2),
        "2": (2, 2),
    }
    statuses = {name: set(each["statuses"]) for name, each in figures["disturbed"].items()}
    refused = {name for name, told in statuses.items() if told == {400}}
    assert refused == {"a text of 1 MB", "200,000 token ids", "30,000 messages"}
    assert all(told == {200} for name, told in statuses.items() if name not in refused)


@pytest.mark.integration
@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN], ids=["as usual", "ignored by a script's shell"])
def test_an_interrupt_leaves_figures_of_the_rounds_before(handler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured, before = 0, signal.signal(signal.SIGINT, handler)

    async def interrupted(*given: Any) -> Round:
        nonlocal measured
        measured += 1
        if measured == 4:  # the second round's second way
            signal.raise_signal(signal.SIGINT)  # as Ctrl-C: the server that is measured takes it first
            await asyncio.get_running_loop().create_future()
        return await round_(*given)

    round_ = gateway._round
    monkeypatch.setattr(gateway, "_round", interrupted)
    path = tmp_path / "result.json"
    try:
        done = CliRunner().invoke(cli, [*SMALL, "--json", str(path)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.exit_code == 1 and "it was interrupted" in done.output
    figures = json.loads(path.read_text())
    assert {at_once: (len(each["direct"]), len(each["http"])) for at_once, each in figures["concurrency"].items()} == {"1": (1, 1)}
    assert figures["disturbed"] == {}


@pytest.mark.integration
def test_a_model_that_is_not_there_is_told() -> None:
    result = CliRunner().invoke(cli, [*SMALL, "--model", "nowhere/to-be-found-folder/x"])
    assert result.exit_code == 1
    assert "nowhere" in result.output
