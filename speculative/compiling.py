"""Compiled graphs for an engine: taken from the cache, or made in processes of their own.

As a program (``python -m speculative.compiling CACHE NAME < config.json``) it compiles one graph.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from models.compiled import DYNAMIC, Graph, compile_graph, decoder_graph, default_cache, fingerprint, load_graph
from models.llama import Llama
from speculative.batch import tree_layout
from speculative.config import EngineConfig
from speculative.drafters.moa import MoADrafter
from speculative.drafters.moa_graphs import drafter_graphs
from speculative.engine import Engine
from speculative.errors import EngineLoadError
from speculative.sampling import argmax


class _Head(nn.Module):
    """Logits and the best token of each row."""

    def __init__(self, target: Llama) -> None:
        super().__init__()
        self.head = target.lm_head

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits: Tensor = self.head(hidden)
        return logits, argmax(logits)


class _Layout(nn.Module):
    """``tree_layout``."""

    def __init__(self, scratch: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.scratch, self.dtype = scratch, dtype

    def forward(self, parents: Tensor, offsets: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        return tree_layout(parents, offsets, columns, scratch=self.scratch, dtype=self.dtype)


def compile_engine(engine: Engine, config: EngineConfig) -> None:
    """Let an engine run on compiled graphs; raises EngineLoadError when compilation fails."""
    cache = default_cache()
    paths = {graph.name: _path(cache, graph) for graph in _graphs(engine)}
    missing = [name for name, path in paths.items() if not path.exists()]
    if missing:
        _compile_apart(config, cache, missing)
    loaded = {name: load_graph(path) for name, path in paths.items()}
    engine.target.compiled = loaded.pop("decoder")
    engine.compiled = {name: loaded.pop(name) for name in ("head", "layout")}
    if isinstance(engine.drafter, MoADrafter):
        engine.drafter.compiled = loaded


def _graphs(engine: Engine) -> list[Graph]:
    target, scratch = engine.target, engine.cache.scratch
    hidden = torch.zeros(3, target.config.hidden_size, dtype=target.dtype)
    parents = torch.tensor([[0, 1, 1], [0, 0, 1]])
    sizes = ({0: DYNAMIC, 1: DYNAMIC}, {0: DYNAMIC}, {0: DYNAMIC})
    graphs = [
        decoder_graph(target),
        Graph("head", _Head(target), (hidden,), ({0: DYNAMIC},)),
        Graph(
            "layout",
            _Layout(scratch, target.dtype),
            (parents, torch.tensor([7, 9]), torch.arange(64)),
            sizes,
            settings=f"{scratch} {target.dtype}",
        ),
    ]
    drafter = engine.drafter
    if isinstance(drafter, MoADrafter) and not drafter.borrowed:
        graphs += drafter_graphs(drafter, engine.largest_shape.breadth)
    return graphs


def _path(cache: Path, graph: Graph) -> Path:
    return cache / f"{graph.name}-{fingerprint(graph)}.pt2"


def _compile_apart(config: EngineConfig, cache: Path, names: list[str]) -> None:
    """Compile each graph in a child, one on each core: the compiler's memory, threads and modules end with it."""
    # The first is the largest; the others are done by the time it is.
    with (
        ThreadPoolExecutor(max_workers=min(len(names), os.cpu_count() or 1)) as pool,
        tqdm(total=len(names), desc="compiling for this machine, once (--compile off skips it)", unit="graph") as bar,
    ):
        for done in as_completed([pool.submit(_compile_one, config, cache, name) for name in names]):
            done.result()
            bar.update()


def _compile_one(config: EngineConfig, cache: Path, name: str) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "speculative.compiling", str(cache), name],
        input=json.dumps(dataclasses.asdict(config)),
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        # Compilers warn by the thousand lines.
        errors = [line for line in child.stderr.splitlines() if "error" in line.lower()] or child.stderr.splitlines()
        raise EngineLoadError("\n".join((f"compiling {name} failed; --compile off goes without. It ended with:", *errors[-6:])))


def main() -> None:
    """Compile the named graph for the EngineConfig on standard input."""
    from speculative.loading import load_uncompiled

    for graph in _graphs(load_uncompiled(EngineConfig(**json.load(sys.stdin)))):
        if graph.name == sys.argv[2]:
            compile_graph(graph, _path(Path(sys.argv[1]), graph))


if __name__ == "__main__":
    main()
