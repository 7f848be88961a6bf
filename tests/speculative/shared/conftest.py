"""Engines whose target is shared by processes with gloo. A process leads one at a time."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from speculative.config import EngineConfig
from speculative.engine import Engine
from speculative.loading import load_engine
from tests.speculative.conftest import DRAFT, N0

LoadEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def load(drafter_folders: dict[str, Path]) -> LoadEngine:
    """Loads an engine with a target that ``size`` processes share; who asks for several closes it."""

    def load(target: Path, drafter: str, size: int, **settings: object) -> Engine:
        chosen = {"moa": target.parent / "drafter", **drafter_folders}.get(drafter, drafter)
        given = {"max_model_len": 128, "max_num_seqs": 3, "prefill_chunk": 20, "compile": "off", **DRAFT, **settings}
        given |= {"num_threads": 1, "tensor_parallel_size": size}
        return load_engine(EngineConfig(model=str(target), drafter=str(chosen), dtype="float32", device="cpu", **given))  # type: ignore[arg-type]

    return load


@pytest.fixture
def shared(load: LoadEngine) -> Iterator[Engine]:
    """An engine of two processes that a test may break."""
    engine = load(N0 / "target", "moa", 2)
    yield engine
    engine.close()


def other(engine: Engine) -> subprocess.Popen[bytes]:
    """The process behind the first."""
    assert engine.ranks is not None
    (rank,) = engine.ranks._others
    return rank.process
