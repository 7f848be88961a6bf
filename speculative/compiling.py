"""Compiled graphs for an engine: taken from the cache, or made in processes of their own.

As a program (``python -m speculative.compiling CACHE``) it compiles those that it is told to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Final

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from models.compiled import DYNAMIC, Graph, compile_graph, decoder_graph, default_cache, fingerprint
from models.graph_runner import build_runner, load_graph, load_long_graph, runner_fingerprint
from models.llama import Llama
from speculative.batch import TreeLayout
from speculative.config import EngineConfig
from speculative.drafters.moa import MoADrafter
from speculative.drafters.moa_graphs import drafter_graphs
from speculative.drafters.wrapper import innermost
from speculative.engine import Engine
from speculative.errors import EngineLoadError
from speculative.sampling import argmax

RUNNER: Final = "runner"
"""Names the library that runs long graphs, among the graphs."""


class _Head(nn.Module):
    """Logits and the best token of each row."""

    def __init__(self, target: Llama) -> None:
        super().__init__()
        self.head = target.lm_head

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits: Tensor = self.head(hidden)
        return logits, argmax(logits)


def compile_engine(engine: Engine, config: EngineConfig) -> None:
    """Let an engine run on compiled graphs; raises EngineLoadError when compilation fails."""
    cache = default_cache()
    runner = _runner(cache)
    packages = {graph.name: _package(cache, graph) for graph in _graphs(engine)}
    missing = [name for name, path in {**packages, RUNNER: runner}.items() if not path.exists()]
    if missing:
        _compile_apart(config, cache, missing)
    # Prompts are read in one call that takes tens of milliseconds.
    engine.target.compiled = load_long_graph(packages.pop("decoder"), runner)
    loaded = {name: load_graph(package) for name, package in packages.items()}
    engine.compiled = {name: loaded.pop(name) for name in ("head", "layout")}
    drafter = innermost(engine.drafter)
    if isinstance(drafter, MoADrafter):
        drafter.compiled = loaded


def _graphs(engine: Engine) -> list[Graph]:
    target = engine.target
    hidden = torch.zeros(3, target.config.hidden_size, dtype=target.dtype)
    layout = TreeLayout(engine.cache, target.config.groups)
    parents, sizes = torch.tensor([[0, 1, 1], [0, 0, 1]]), ({0: DYNAMIC, 1: DYNAMIC}, {0: DYNAMIC}, {0: DYNAMIC})
    graphs = [
        decoder_graph(target),
        Graph("head", _Head(target), (hidden,), ({0: DYNAMIC},)),
        Graph("layout", layout, (parents, torch.tensor([7, 9]), torch.arange(64)), sizes, layout.settings),
    ]
    drafter = innermost(engine.drafter)
    if isinstance(drafter, MoADrafter) and not drafter.borrowed:
        graphs += drafter_graphs(drafter, engine.cache)
    return graphs


def _package(cache: Path, graph: Graph) -> Path:
    return cache / f"{graph.name}-{fingerprint(graph)}.pt2"


def _runner(cache: Path) -> Path:
    return cache / f"{RUNNER}-{runner_fingerprint()}.so"


def _compile_apart(config: EngineConfig, cache: Path, names: list[str]) -> None:
    """Compile in children, one on each core: the compiler's memory, threads and modules end with them."""
    # Graphs are tuned for a number of threads, which something else in this process may have set.
    config = dataclasses.replace(config, num_threads=torch.get_num_threads())
    workers = min(len(names), os.cpu_count() or 1)
    waiting: SimpleQueue[str | None] = SimpleQueue()
    for name in (*names, *(None,) * workers):
        waiting.put(name)
    with (
        ThreadPoolExecutor(max_workers=workers) as pool,
        tqdm(total=len(names), desc="compiling for this machine, once (--compile off skips it)", unit="graph") as bar,
    ):
        for worker in as_completed([pool.submit(_compile_waiting, config, cache, waiting, bar.update) for _ in range(workers)]):
            worker.result()


def _compile_waiting(config: EngineConfig, cache: Path, waiting: SimpleQueue[str | None], progress: Callable[[], object]) -> None:
    """Hand graphs to one child until none is left."""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "speculative.compiling", str(cache)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as child,
    ):
        assert child.stdin is not None and child.stdout is not None
        line = json.dumps(dataclasses.asdict(config))
        while name := waiting.get():
            with contextlib.suppress(BrokenPipeError):
                print(f"{line}\n{name}" if line else name, file=child.stdin, flush=True)
            line = ""
            if not child.stdout.readline():
                raise EngineLoadError(_failure(name, errors))
            progress()


def _failure(name: str, errors: IO[str]) -> str:
    errors.seek(0)
    lines = errors.read().splitlines()
    # Compilers warn by the thousand lines.
    told = [line for line in lines if "error" in line.lower()] or lines
    return "\n".join((f"compiling {name} failed; --compile off goes without. It ended with:", *told[-6:]))


def main() -> None:
    """Compile the graphs named on standard input, after an EngineConfig in its first line; print each name when it is done."""
    from speculative.loading import load_uncompiled

    # Compilers print too; standard output is for names.
    done, sys.stdout = sys.stdout, sys.stderr
    graphs = {graph.name: graph for graph in _graphs(load_uncompiled(EngineConfig(**json.loads(sys.stdin.readline()))))}
    cache = Path(sys.argv[1])
    for name in map(str.strip, sys.stdin):
        if name == RUNNER:
            build_runner(_runner(cache))
        else:
            compile_graph(graphs[name], _package(cache, graphs[name]))
        print(name, file=done, flush=True)


if __name__ == "__main__":
    main()
