"""Compiled graphs are made once, whoever else wants them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from speculative import packages
from speculative.packages import RUNNER, Recipe


def test_engines_that_start_together_compile_one_after_the_other_and_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = tmp_path / "compiled" / "runner.so"
    together, compiled = Barrier(3), []

    def compile_apart(recipe: Recipe, cache: Path, names: list[str]) -> None:
        compiled.append(names)
        assert not runner.exists()
        runner.touch()

    def start() -> Path:
        together.wait()
        return packages.packages([], Recipe("none", "none", {}))[1]

    monkeypatch.setattr(packages, "default_cache", lambda: runner.parent)
    monkeypatch.setattr(packages, "runner_path", lambda _: runner)
    monkeypatch.setattr(packages, "_compile_apart", compile_apart)
    with ThreadPoolExecutor(3) as pool:
        assert [each.result() for each in [pool.submit(start) for _ in range(3)]] == [runner] * 3
    assert compiled == [[RUNNER]]
