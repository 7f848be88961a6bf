"""Compiled graphs are made once, whoever else wants them, and wherever the engine is."""

from __future__ import annotations

import builtins
import errno
import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from threading import Barrier

import pytest

from models.graph_runner import intact, keep
from speculative import packages
from speculative.errors import EngineLoadError
from speculative.packages import RUNNER, CompileCacheError, Recipe

NOTHING = Recipe("none", "none", {})


def put(runner: Path) -> None:
    """As if it had been compiled."""
    made = runner.with_suffix(".made")
    made.write_bytes(b"a library")
    keep(made, runner)


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the library belongs."""
    runner = tmp_path / "compiled" / "runner.so"
    monkeypatch.setattr(packages, "default_cache", lambda: runner.parent)
    monkeypatch.setattr(packages, "runner_path", lambda _: runner)
    return runner


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces the processes that compile by a shell script, which comes after the recipe is read."""

    def replace(script: str) -> None:
        child = tmp_path / "child"
        child.write_text(f"#!/bin/sh\nread -r recipe\n{script}\n")
        child.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(child))

    return replace


def test_engines_that_start_together_compile_one_after_the_other_and_nothing_twice(
    runner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, compiled = Barrier(3), []

    def compile_apart(recipe: Recipe, cache: Path, names: list[str]) -> None:
        compiled.append(names)
        assert not runner.exists()
        put(runner)

    def start() -> Path:
        together.wait()
        return packages.packages([], NOTHING)[1]

    monkeypatch.setattr(packages, "_compile_apart", compile_apart)
    with ThreadPoolExecutor(3) as pool:
        assert [each.result() for each in [pool.submit(start) for _ in range(3)]] == [runner] * 3
    assert compiled == [[RUNNER]]


@pytest.mark.parametrize("damaged", [b"", b"hello", b"a libra"])
def test_what_is_damaged_is_compiled_anew_once(
    runner: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damaged: bytes
) -> None:
    compiled = []

    def compile_apart(recipe: Recipe, cache: Path, names: list[str]) -> None:
        compiled.append(names)
        put(runner)

    monkeypatch.setattr(packages, "_compile_apart", compile_apart)
    runner.parent.mkdir()
    runner.write_bytes(damaged)
    for _ in range(2):
        packages.packages([], NOTHING)
    assert intact(runner) and compiled == [[RUNNER]]
    assert [record.getMessage() for record in caplog.records] == [f"{runner} is damaged, and compiled anew"]


@pytest.mark.parametrize("below", ["file", "file/folder", "read-only"])
def test_a_folder_that_cannot_be_made_or_written_is_named_with_the_cure(
    tmp_path: Path, runner: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "read-only").mkdir()
    if below == "read-only":

        def refuse(*, dir: Path) -> None:  # root may write whatever the mode says
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(dir))

        monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    monkeypatch.setattr(packages, "default_cache", lambda: tmp_path / below)
    monkeypatch.setattr(packages, "runner_path", lambda cache: cache / "runner.so")
    with pytest.raises(CompileCacheError, match=rf"compiled into {tmp_path / below}: .*XDG_CACHE_HOME, or say --compile off"):
        packages.packages([], NOTHING)


def test_a_folder_that_can_be_read_alone_is_read(runner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner.parent.mkdir()
    put(runner)
    monkeypatch.setattr(packages, "FileLock", lambda _: pytest.fail("locked"))
    assert packages.packages([], NOTHING) == ({}, runner)
    assert [path.name for path in runner.parent.iterdir()] == [runner.name]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("stream", [1, 2], ids=["told", "printed"])
def test_a_compiler_without_room_says_so(tmp_path: Path, child: Callable[[str], None], number: int, stream: int) -> None:
    said = f"warning: this is no error\nld: final link failed: {os.strerror(number)}\ncollect2: error: ld returned 1"
    (tmp_path / "said").write_text(json.dumps(said) if stream == 1 else said)
    child(f"cat {tmp_path}/said >&{stream}")
    with pytest.raises(CompileCacheError, match=rf"no room to compile decoder in {tmp_path}.*: ld: .*{os.strerror(number)}; name"):
        packages._compile_apart(NOTHING, tmp_path, ["decoder"])


def test_a_compiler_that_fails_otherwise_is_not_the_folders_fault(tmp_path: Path, child: Callable[[str], None]) -> None:
    child("echo 'fatal error: no such header' >&2")
    with pytest.raises(EngineLoadError, match=r"compiling decoder failed.*\nfatal error: no such header") as failed:
        packages._compile_apart(NOTHING, tmp_path, ["decoder"])
    assert not isinstance(failed.value, CompileCacheError)


def test_children_are_told_what_to_compile_where_print_is_not_pythons(
    tmp_path: Path, child: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    child(f'echo "$recipe" > {tmp_path}/recipe\nwhile read -r name; do echo $name; done')
    recipe = Recipe("some.module", "graphs", {"model": "bundled"})

    def print_as_ray_serve_does(*values: object, **named: object) -> None:
        raise AssertionError(f"printed {values}")

    monkeypatch.setattr(builtins, "print", print_as_ray_serve_does)
    packages._compile_apart(recipe, tmp_path, ["decoder"])
    assert json.loads((tmp_path / "recipe").read_text()) == asdict(recipe)
