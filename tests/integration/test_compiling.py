"""Compiling for this machine: layouts without operators, what comes of compilers that fail, and how they end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.compiled import compile_graph
from models.graph_runner import load_graph
from models.loader import load_target
from speculative.batch import TreeLayout
from speculative.compiling import layout_graph
from speculative.edge.config import EdgeConfig
from speculative.edge.drafting import EdgeModel
from speculative.edge.opening import Server
from speculative.edge_export import export_edge
from speculative.errors import EngineLoadError
from tests.integration.compiling import FIXTURE, load

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs g++"),
]


@pytest.mark.filterwarnings("default::DeprecationWarning")  # PyTorch's compiler has some of PyTorch's own
def test_without_operators_trees_are_laid_out_by_a_graph(tmp_path: Path) -> None:
    cache, groups = load_target(FIXTURE / "target", dtype=torch.float32)[0].new_cache(4, 12, 128), 2
    compile_graph(layout_graph(cache, groups), tmp_path / "layout.pt2")
    compiled, layout = load_graph(tmp_path / "layout.pt2"), TreeLayout(cache, groups)
    for parents in ([[0, 1, 1, 0]], [[0, 1], [0, 0], [0, 1]]):
        inputs = [torch.tensor(parents), torch.arange(len(parents)) * 9, torch.arange(64)]
        for one, other in zip(compiled(inputs), layout(*inputs), strict=True):
            assert torch.equal(one, other)


def test_without_a_compiler_auto_goes_without_and_on_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not load("auto", num_threads=1).target.compiled
    with pytest.raises(EngineLoadError, match="--compile on: no C\\+\\+ compiler"):
        load("on", num_threads=1)


def test_without_a_place_for_what_is_compiled_auto_goes_without_and_on_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    engine = load("auto", num_threads=1, dtype="auto")
    assert not engine.target.compiled and engine.info.dtype == load("off", num_threads=1, dtype="auto").info.dtype
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told.startswith(
        f"going on uncompiled, which is slower: nothing can be compiled into {tmp_path}/file/moaserve/compiled: "
    )
    assert "XDG_CACHE_HOME" in told
    with pytest.raises(EngineLoadError, match=rf"--compile on: nothing can be compiled into {tmp_path}/file.*XDG_CACHE_HOME"):
        load("on", num_threads=1)


def test_what_is_as_it_was_made_and_cannot_be_loaded_is_not_loaded_by_auto_and_on_names_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(runner: Path) -> None:
        raise OSError(f"{runner}: failed to map segment from shared object")

    monkeypatch.setattr("speculative.compiling.packages", lambda *_: ({}, tmp_path / "runner.so"))
    monkeypatch.setattr("speculative.compiling.load_runner", refuse)
    assert not load("auto", num_threads=1).target.compiled
    with pytest.raises(EngineLoadError, match=f"--compile on: cannot load what was compiled into {tmp_path}: .*failed to map"):
        load("on", num_threads=1)


def test_a_compiler_without_room_leaves_auto_uncompiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = tmp_path / "full"
    refusal = "*-shared*) echo 'ld: final link failed: No space left on device' >&2; exit 1;;"
    full.write_text(f'#!/bin/sh\ncase "$*" in {refusal} *) exec g++ "$@";; esac\n')
    full.chmod(0o755)
    monkeypatch.setenv("CXX", str(full))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not load("auto", num_threads=1, drafter="none").target.compiled
    assert f"in {tmp_path}/moaserve/compiled, or for the compiler's temporary files: " in caplog.text


def test_a_failing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken-compiler"
    broken.write_text("#!/bin/sh\necho cannot compile today >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(EngineLoadError, match="--compile off goes without"):
        load("on", num_threads=1, drafter="none")


@pytest.mark.parametrize(
    "deaf",
    [
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",  # as for what a shell's script runs in the background
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])",  # as if it had come just before the wait
    ],
)
def test_a_compiler_that_nobody_asks_any_more_ends_however_interrupts_fare(tmp_path: Path, deaf: str) -> None:
    code = f"import signal; {deaf}; import runpy, sys; sys.argv[1:] = sys.argv[2:]; "
    code += "runpy.run_module('speculative.packages', run_name='__main__')"
    with subprocess.Popen([sys.executable, "-c", code, "-", str(tmp_path)], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(timeout=120) == 0


def test_an_edge_with_int8_weights_says_why_it_is_not_compiled(tmp_path: Path) -> None:
    export_edge(str(FIXTURE / "target"), str(FIXTURE / "drafter"), tmp_path / "edge", quantization="int8")
    config = EdgeConfig(Server("ws://127.0.0.1:1"), tmp_path / "edge", compile="on")
    with pytest.raises(EngineLoadError, match="--compile on: int8 weights"):
        EdgeModel.load(config)
    assert EdgeModel.load(replace(config, compile="auto")).info.dtype == "int8"


def test_an_edge_that_is_told_to_stop_while_its_drafter_is_compiled_does(tmp_path: Path) -> None:
    export_edge(str(FIXTURE / "target"), str(FIXTURE / "drafter"), tmp_path / "edge", dtype="float32")
    command = [sys.executable, "-m", "app.cli", "edge", "--port", "0", "--server", "ws://127.0.0.1:1"]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with subprocess.Popen(
        [*command, "--bundle", str(tmp_path / "edge")], stderr=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stderr is not None
        while "compiling for this machine" not in (said := process.stderr.readline()):
            assert said, "it has ended"
        assert "INFO moaserve.engine" in said, "where nobody looks there is no bar, but a line in the log"
        process.terminate()
        try:
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
        process.stderr.close()
