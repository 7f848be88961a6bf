"""Whether memory grows: what is asked, and what is made of what was seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli import cli
from benchmarks.soak import SoakResult, asked

MIB = 2**20


def result(*sizes: float) -> SoakResult:
    return SoakResult(
        {"chat": 100 * len(sizes)}, 50.0, tuple((100 * place, round(size * MIB)) for place, size in enumerate(sizes, 1))
    )


def test_memory_that_fills_and_stays_does_not_grow() -> None:
    filled = result(400, 480, 500, 500, 500, 501, 500, 500)
    assert filled.growth == 0 and abs(filled.slope) < 0.01 * MIB
    assert "400.0 MiB at first, 501.0 at most, 500.0 at last" in filled.line()


def test_a_leak_shows() -> None:
    leaking = result(*(400 + 2 * place for place in range(20)))
    assert leaking.slope == pytest.approx(2 * MIB / 100)
    assert leaking.growth == 20 * MIB
    assert "+20480.0 KiB per 1,000 requests" in leaking.line()


def test_no_two_requests_say_the_same() -> None:
    requests = [asked(number, ["a", "b", "c"]) for number in range(240)]
    assert len({json.dumps(one.body) for one in requests}) == 240
    assert len({one.kind for one in requests}) == 12
    assert {one.status for one in requests} == {200, 400, 404}


@pytest.mark.integration
def test_a_real_server_stays_within_its_limit(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    few = ["--num-requests", "100", "--concurrency", "4", "--compile", "off", "--num-threads", "1", "--most-growth", "1000"]
    limit = ["--dtype", "float32", "--memory-limit", "1100MiB", "--prefix-cache-tokens", "20000", "--max-model-len", "512"]
    done = CliRunner().invoke(cli, ["bench", "soak", *few, *limit, "--json", str(out)])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert sum(found["requests"].values()) == 100 and len(found["requests"]) == 12
    assert 0 < found["peak"] < 1100 * MIB
