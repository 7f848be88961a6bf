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

from tqdm.auto import tqdm

from models.compiled import Graph, compile_graph, default_cache, fingerprint, load_graph, target_graphs
from models.llama import CompiledGraph
from speculative.config import EngineConfig
from speculative.drafters.moa import MoADrafter
from speculative.drafters.moa_graphs import drafter_graphs
from speculative.engine import Engine
from speculative.errors import EngineLoadError


def compile_engine(engine: Engine, config: EngineConfig) -> None:
    """Let an engine run on compiled graphs; raises EngineLoadError when compilation fails."""
    cache = default_cache()
    graphs = [(graph, _path(cache, graph), owner) for graph, owner in _graphs(engine)]
    missing = [graph.name for graph, path, _ in graphs if not path.exists()]
    if missing:
        _compile_apart(config, cache, missing)
    for graph, path, owner in graphs:
        owner[graph.name] = load_graph(path)


def _graphs(engine: Engine) -> list[tuple[Graph, dict[str, CompiledGraph]]]:
    """What there is to compile, and where the results belong."""
    graphs = [(graph, engine.target.compiled) for graph in target_graphs(engine.target)]
    drafter = engine.drafter
    if isinstance(drafter, MoADrafter) and not drafter.borrowed:
        graphs += [(graph, drafter.compiled) for graph in drafter_graphs(drafter, engine.largest_shape.breadth)]
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
        raise EngineLoadError(f"compiling {name} failed; --compile off goes without. The compiler said:\n{child.stderr[-2000:]}")


def main() -> None:
    """Compile the named graph for the EngineConfig on standard input."""
    from speculative.loading import load_uncompiled

    for graph, _ in _graphs(load_uncompiled(EngineConfig(**json.load(sys.stdin)))):
        if graph.name == sys.argv[2]:
            compile_graph(graph, _path(Path(sys.argv[1]), graph))


if __name__ == "__main__":
    main()
