"""An edge without a C++ compiler drafts by operators that were compiled beforehand, or uncompiled."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models import graph_runner
from models.compiled import default_cache
from models.graph_runner import runner_path
from speculative.edge.config import EdgeConfig
from speculative.edge.drafting import EdgeModel
from speculative.edge.opening import Server
from speculative.edge_export import export_edge
from speculative.errors import EngineLoadError
from tests.integration.compiling import FIXTURE

pytestmark = pytest.mark.integration


@pytest.fixture
def no_compiler(operators: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process has operators beside its sources and no compiler."""
    (tmp_path / "prebuilt").mkdir()
    built = runner_path(default_cache())
    shutil.copyfile(built, tmp_path / "prebuilt" / built.name)
    monkeypatch.setattr(graph_runner, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    assert not (tmp_path / "cache").exists(), "something was compiled"


@pytest.mark.usefixtures("no_compiler")
def test_the_bundled_pairs_edge_drafts_by_operators(tmp_path: Path) -> None:
    export_edge("bundled", "bundled", tmp_path / "bundle")
    for choice in ("auto", "on"):
        config = EdgeConfig(Server("ws://127.0.0.1:1"), tmp_path / "bundle", num_threads=1, compile=choice)
        model = EdgeModel.load(config)
        assert model._first.trees is not None and model.info.dtype == "bfloat16"


@pytest.mark.usefixtures("no_compiler")
def test_one_whose_drafter_takes_graphs_drafts_uncompiled(tmp_path: Path) -> None:
    export_edge(str(FIXTURE / "target"), str(FIXTURE / "drafter"), tmp_path / "bundle")
    config = EdgeConfig(Server("ws://127.0.0.1:1"), tmp_path / "bundle", num_threads=1)
    assert not EdgeModel.load(config)._first.runs_compiled
    with pytest.raises(EngineLoadError, match=r"--compile on: no C\+\+ compiler found"):
        EdgeModel.load(replace(config, compile="on"))
