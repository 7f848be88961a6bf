"""Compiled graphs are made once, whoever else wants them, and wherever the engine is."""

from __future__ import annotations

import builtins
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
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


def test_children_are_told_what_to_compile_where_print_is_not_pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path / "child"
    child.write_text(f'#!/bin/sh\nread -r recipe\necho "$recipe" > {tmp_path}/recipe\nwhile read -r name; do echo $name; done\n')
    child.chmod(0o755)
    recipe = Recipe("some.module", "graphs", {"model": "bundled"})

    def print_as_ray_serve_does(*values: object, **named: object) -> None:
        raise AssertionError(f"printed {values}")

    monkeypatch.setattr(sys, "executable", str(child))
    monkeypatch.setattr(builtins, "print", print_as_ray_serve_does)
    packages._compile_apart(recipe, tmp_path, ["decoder"])
    assert json.loads((tmp_path / "recipe").read_text()) == asdict(recipe)
