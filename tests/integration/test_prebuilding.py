"""Operators that were compiled beforehand, as in the image: a machine without a compiler uses them and compiles nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from models.compiled import default_cache
from models.graph_runner import runner_path
from models.tiles import has_operators

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs g++"),
    pytest.mark.skipif(not has_operators(), reason="there are operators for x86 CPUs with AVX2 alone"),
]

ROOT = Path(__file__).parents[2]

ANSWERS = """
import sys
from speculative.compiling import means
from speculative.config import EngineConfig
from speculative.loading import load_engine
from speculative.request import Request, SamplingParams

for choice in sys.argv[1:]:
    engine = load_engine(EngineConfig(dtype="float32", num_threads=1, compile=choice, draft_policy="fixed", max_num_seqs=2))
    engine.add(Request("greedy", tuple(range(300, 340)), SamplingParams(40, temperature=0.0)))
    engine.add(Request("seeded", tuple(range(500, 520)), SamplingParams(40, temperature=0.9, seed=3)))
    tokens = {"greedy": [], "seeded": []}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
    print(means(engine), tokens, sep=": ")
"""


@pytest.fixture(scope="module")
def installed(operators: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, with what the image's build adds to it; of the two kinds that of this CPU is there already."""
    folder = tmp_path_factory.mktemp("installed")
    for package in ("app", "models", "speculative"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "pretrained", "prebuilt"))
    (folder / "models" / "pretrained").symlink_to(ROOT / "models" / "pretrained")
    (folder / "models" / "prebuilt").mkdir()
    shutil.copy(runner_path(default_cache()), folder / "models" / "prebuilt")
    for _ in range(2):  # the second time there is nothing left to do
        command = [sys.executable, "-m", "models.prebuilding"]
        built = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    assert built.stdout == ""
    return folder


@pytest.mark.parametrize("isa", ["", "AVX2"], ids=["of this CPU", "of AVX2"])
def test_they_answer_as_without_and_nothing_is_compiled(installed: Path, tmp_path: Path, isa: str) -> None:
    (tmp_path / "bin").mkdir()  # no g++ there
    environment = os.environ | {
        "PATH": str(tmp_path / "bin"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "ONEDNN_MAX_CPU_ISA": isa or "DEFAULT",
        "PYTHONPATH": str(installed),
    }
    environment.pop("CXX", None)
    command = [sys.executable, "-c", ANSWERS, "auto", "on", "off"]
    answered = subprocess.run(command, cwd=installed, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    auto, on, off = (line.split(": ", 1) for line in answered.stdout.splitlines())
    assert auto == on and auto[0].startswith("our operators (") and off[0] == "PyTorch, uncompiled"
    assert isa in auto[0]
    assert auto[1] == off[1]
    assert not (tmp_path / "cache").exists()
