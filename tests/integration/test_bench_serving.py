"""`moaserve bench serving` with real servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.cli import cli
from tests.integration.conftest import Server

pytestmark = pytest.mark.integration

SMALL = ["--num-requests", "4", "--seconds", "0", "--warm-up", "1", "--num-prompts", "4", "--max-tokens", "16", "--rounds", "1"]


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    return subprocess.run(
        [sys.executable, "-m", "app.cli", "bench", "serving", *options],
        capture_output=True,
        text=True,
        env=environment | {"COLUMNS": "200"},
        timeout=300,
    )


def figures(folder: Path) -> dict[tuple[str, float], dict[str, Any]]:
    """Of all rounds, by way and rate."""
    told = json.loads((folder / "results.json").read_text())
    return {(each["way"], each["rate"]): each["figures"] for each in told["figures"] if each["round"] is None}


def test_every_way_is_measured_and_another_server_put_beside(tmp_path: Path, server: Server) -> None:
    ways = [part for way in ("off", "chain", "tree", "adaptive", "bare") for part in ("--way", way)]
    engine = ["--compile", "off", "--dtype", "float32", "--max-num-seqs", "3", "--num-threads", "1"]
    done = bench(*SMALL, *ways, *engine, "--load", "0.6,1.2", "--out", str(tmp_path / "ours"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Capacity: plain decoding sustains" in done.stdout and "3 at a time" in done.stdout
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {
        "results.json",
        "latency.png",
        "throughput.png",
        "speed-up.png",
    }
    told = json.loads((tmp_path / "ours" / "results.json").read_text())
    assert told["provenance"]["commit"] and told["settings"]["asked"]["digest"] and told["failures"] == []
    assert told["slo"]["ttft"] == pytest.approx(5 * told["alone"]["ttft"], rel=1e-4)
    rates = told["settings"]["asked"]["rates"]
    assert rates == pytest.approx([share * told["capacity"]["requests_per_second"] for share in (0.6, 1.2)], rel=1e-3)
    found = figures(tmp_path / "ours")
    assert set(found) == {(way, rate) for way in ("off", "chain", "tree", "adaptive", "bare") for rate in rates}
    for (way, _), each in found.items():
        assert (each["requests"], each["failed"]) == (4, 0) and 4 <= each["tokens"] <= 4 * 16
        assert 0 < each["ttft"]["p50"] <= each["e2e"]["p50"] <= each["e2e"]["p99"]
        assert 0 < each["busy"] <= 1 and each["speed_up"]["same"] == each["speed_up"]["pairs"] == 4  # in float32
        assert (each["tau"] == 1) == (way in ("off", "bare")) or way == "adaptive"
        assert each["tau"] <= (4 if way == "chain" else 9) and each["cached_share"] == 0
    runs = {(run["way"], run["rate"]): run["requests"] for run in told["runs"]}
    assert all(runs["off", rate]["at"] == runs["tree", rate]["at"] for rate in rates)
    assert all(runs["off", rates[0]]["tokens"] == runs[way, rates[0]]["tokens"] for way in ("chain", "tree", "bare"))

    there = ["--base-url", server.base_url, "--name", "theirs", "--ask", "text", "--compare", str(tmp_path / "ours")]
    done = bench(*SMALL, *there, "--out", str(tmp_path / "theirs"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "theirs" in done.stdout and "tree (ours)" in done.stdout
    beside = figures(tmp_path / "theirs")
    assert set(beside) == {("theirs", rate) for rate in rates}
    # The same model in the same type, asked by text instead of tokens: the same answers.
    assert all(each["speed_up"]["same"] == 4 and each["busy"] is None for each in beside.values())
    assert json.loads((tmp_path / "theirs" / "results.json").read_text())["slo"] == told["slo"]

    done = bench(*SMALL, *there, "--seed", "1")
    assert done.returncode == 1 and f"--compare {tmp_path / 'ours'}: it did not ask the same: seed 1 here" in done.stderr


def test_chats_are_measured_of_any_server(tmp_path: Path, server: Server) -> None:
    done = bench(
        *SMALL, "--base-url", server.base_url, "--rates", "8,20", "--slo", "ttft:60s,e2e:60s", "--extra", '{"speculative": false}'
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Goodput counts answers with the first token within 60 s, the end within 60 s" in done.stdout
    assert "Capacity" not in done.stdout  # it was not asked to be loaded so
    failing = bench(*SMALL, "--base-url", server.base_url, "--rates", "8", "--extra", '{"nonsense": 1}')
    assert failing.returncode == 1 and "8 of 8 requests failed" in failing.stderr and "nonsense" in failing.stderr


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--base-url", "http://127.0.0.1:9/v1"], 1, "--base-url http://127.0.0.1:9/v1: no server answers"),
        (["--base-url", "127.0.0.1:9"], 1, "--base-url 127.0.0.1:9: it must be http://HOST:PORT/v1"),
        (["--rates", "1", "--load", "1"], 2, "--rates and --load say the same"),
        (["--rates", "1,fast"], 2, "--rates must be numbers with commas, got '1,fast'"),
        (["--load", "0"], 2, "--load: each must be more than 0"),
        (["--slo", "ttft:5"], 2, "--slo: 'ttft:5' is no limit such as ttft:500ms"),
        (["--way", "forest"], 2, "no way 'forest': use off, chain, tree, adaptive, bare"),
        (["--ask", "politely"], 2, "--ask must be tokens, text or chat"),
        (["--extra", "{}"], 2, "--extra is for a server that runs already"),
        (["--served-model", "x"], 2, "--served-model is for a server that runs already"),
        (["--base-url", "http://x/v1", "--draft-depth", "4"], 2, "--draft-depth is of servers that this command starts"),
        (["--base-url", "http://x/v1", "--dtype", "float32"], 2, "--dtype is of servers that this command starts"),
        (["--base-url", "http://[::1/v1"], 1, "--base-url http://[::1/v1: Invalid IPv6 URL"),
        (["--base-url", "http://x/v1", "--way", "off"], 2, "--way is of servers that this command starts"),
        (["--model", "bundled", "--dtype", "int3"], 2, "--dtype"),
        (["--compare", __file__], 1, "holds no results of bench serving"),
        (["--model", "bundled", "--drafter", "no/such-drafter", "--compile", "off"], 1, "nothing was measured"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], code: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = CliRunner().invoke(cli, ["bench", "serving", *options])
    assert done.exit_code == code and message in done.stderr, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
