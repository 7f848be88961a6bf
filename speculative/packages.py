"""Compiled graphs: taken from the cache, or made in processes of their own.

As a program (``python -m speculative.packages CACHE``) it compiles those that it is told to.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, TypeVar

import torch
from filelock import FileLock
from torch import nn
from tqdm.auto import tqdm

from models.compiled import Graph, compile_graph, default_cache, fingerprint, unsupported, without_compiler
from models.graph_runner import build_runner, intact, runner_path
from speculative.config import Compile
from speculative.errors import EngineLoadError

logger = logging.getLogger("moaserve.engine")

RUNNER = "runner"
"""Names the library that runs graphs, among them."""

LOCK = "compiling.lock"
"""The file in the cache that one process at a time holds while it compiles."""

LARGEST_COMPILED = 500_000_000
"""Parameters up to which PyTorch's compiler is run unasked: beyond, weights take the time, and each graph keeps a copy of them.

Operators of our own need no compiling for a model, and what they have of its weights is in the place of what was loaded.
"""

NO_ROOM = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""What is said where a disk is full, or a limit to files or their owner is reached."""


class CompileCacheError(EngineLoadError):
    """Compiled graphs cannot be kept, or loaded, where they are to be: nothing is wrong with the model or the compiler."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}; name another folder with XDG_CACHE_HOME, or say --compile off")


Loaded = TypeVar("Loaded")


def or_uncompiled(load: Callable[[Compile], Loaded], choice: Compile) -> Loaded:
    """What ``load`` loads by ``choice``: anew and uncompiled where that is "auto", and a CompileCacheError says that it cannot be.

    The type of numbers and the memory that there is room for go by whether something is compiled.
    """
    try:
        return load(choice)
    except CompileCacheError as error:
        if choice == "on":
            raise EngineLoadError(f"--compile on: {error}") from error
        logger.warning("going on uncompiled, which is slower: %s", error)
    gc.collect()
    return load("off")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How another process comes by the same graphs: ``function`` of ``module``, called with ``arguments`` (as JSON has them)."""

    module: str
    function: str
    arguments: dict[str, Any]

    def graphs(self) -> dict[str, Graph]:
        """By name; it may load the whole model."""
        made: list[Graph] = getattr(import_module(self.module), self.function)(**self.arguments)
        return {graph.name: graph for graph in made}


def compiles_graphs(choice: Compile, module: nn.Module) -> bool:
    """Whether PyTorch's compiler is to be run for what computes with ``module``: it was asked for, or the network is small.

    Nowhere without a C++ compiler; operators may have been compiled elsewhere.
    """
    wanted = choice == "on" or (choice == "auto" and sum(p.numel() for p in module.parameters()) <= LARGEST_COMPILED)
    return wanted and without_compiler() is None


def compiles(
    choice: Compile, module: nn.Module, device: torch.device, reason: str | None = None, *, by_operators: bool = False
) -> bool:
    """Whether to compile what computes with ``module``, unless a ``reason`` speaks against it; ``by_operators``: without any graph.

    Raises EngineLoadError where it was asked for and cannot be.
    """
    if choice == "off":
        return False
    reason = unsupported(device) or reason
    if reason is None and not by_operators and not compiles_graphs(choice, module):
        reason = without_compiler() or "the model is so large that its products outweigh what compilation saves"
    if reason is not None and choice == "on":
        raise EngineLoadError(f"--compile on: {reason}")
    return reason is None


def packages(graphs: list[Graph], recipe: Recipe) -> tuple[dict[str, Path], Path]:
    """Where each graph is, and the library that runs them (``graph_runner``); raises EngineLoadError if one cannot be made.

    That is a CompileCacheError where there is no place for them.
    """
    cache = default_cache()
    paths, runner = {graph.name: _package(cache, graph) for graph in graphs}, runner_path(cache)
    wanted = paths | {RUNNER: runner}
    try:
        if _missing(wanted):
            cache.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=cache).close()  # a lock from before may be held where nothing can be written
            # Engines that start together would each compile all of it.
            with FileLock(cache / LOCK):
                if missing := _missing(wanted):
                    _tell_damaged(wanted[name] for name in missing)
                    _compile_apart(recipe, cache, missing)
    except (OSError, NotImplementedError) as error:  # the latter where the file system has no locks
        raise CompileCacheError(f"nothing can be compiled into {cache}: {error}") from error
    return paths, runner


def _missing(wanted: Mapping[str, Path]) -> list[str]:
    return [name for name, path in wanted.items() if not intact(path)]


def _tell_damaged(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.exists():
            logger.warning("%s is damaged, and compiled anew", path)


def _package(cache: Path, graph: Graph) -> Path:
    return cache / f"{graph.name}-{fingerprint(graph)}.pt2"


def _compile_apart(recipe: Recipe, cache: Path, names: list[str]) -> None:
    """Compile in children, one on each core: the compiler's memory, threads and modules end with them."""
    message = "compiling for this machine, once (--compile off skips it)"
    if not sys.stderr.isatty():  # a bar is no line of a log
        logger.info("%s: %s", message, ", ".join(names))
    workers = min(len(names), os.cpu_count() or 1)
    waiting: SimpleQueue[str | None] = SimpleQueue()
    for name in (*names, *(None,) * workers):
        waiting.put(name)
    with (
        ThreadPoolExecutor(max_workers=workers) as pool,
        tqdm(total=len(names), desc=message, unit="graph", disable=None) as bar,
    ):
        for worker in as_completed([pool.submit(_compile_waiting, recipe, cache, waiting, bar.update) for _ in range(workers)]):
            worker.result()


def _compile_waiting(recipe: Recipe, cache: Path, waiting: SimpleQueue[str | None], progress: Callable[[], object]) -> None:
    """Hand graphs to one child until none is left."""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "speculative.packages", str(cache)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as child,
    ):
        assert child.stdin is not None and child.stdout is not None
        before = json.dumps(asdict(recipe)) + "\n"
        while name := waiting.get():
            with contextlib.suppress(BrokenPipeError):
                # Not by print, which Ray Serve replaces in its replicas by one that writes something else.
                child.stdin.write(f"{before}{name}\n")
                child.stdin.flush()
            before = ""
            if (answer := child.stdout.readline().strip()) != name:
                errors.seek(0)
                raise _failure(name, cache, json.loads(answer) if answer else errors.read())
            progress()


def _failure(name: str, cache: Path, said: str) -> EngineLoadError:
    lines = said.splitlines()
    if crowded := [line for line in lines if any(each in line for each in NO_ROOM)]:
        return CompileCacheError(f"no room to compile {name} in {cache}, or for the compiler's temporary files: {crowded[-1]}")
    # Compilers warn by the thousand lines.
    told = [line for line in lines if "error" in line.lower()] or lines
    return EngineLoadError("\n".join((f"compiling {name} failed; --compile off goes without. It ended with:", *told[-6:])))


def main() -> None:
    """Compile the graphs named on standard input, after a Recipe in its first line; print each name when it is done.

    What fails is printed instead, as JSON: where the disk is full, no file of errors takes it.
    """
    # Compilers print too; standard output is for names.
    done, sys.stdout = sys.stdout, sys.stderr
    cache, lines, busy = Path(sys.argv[1]), SimpleQueue[str](), Event()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let what runs in the background ignore it
    with contextlib.suppress(KeyboardInterrupt):
        Thread(target=_listen, args=(lines, busy), daemon=True).start()
        if not (recipe := lines.get()):
            return
        try:
            graphs: dict[str, Graph] = {}
            while name := lines.get():
                busy.set()
                if name == RUNNER:
                    build_runner(runner_path(cache))
                else:
                    graphs = graphs or Recipe(**json.loads(recipe)).graphs()
                    compile_graph(graphs[name], _package(cache, graphs[name]))
                busy.clear()
                print(name, file=done, flush=True)
        except Exception:
            print(json.dumps(traceback.format_exc()), file=done, flush=True)
            raise


def _listen(lines: SimpleQueue[str], busy: Event) -> None:
    """Pass on what is asked for. Whoever closes standard input, or ends, waits for nothing more: what is half done is dropped.

    A signal alone could come just before the main thread begins to wait, and be noticed never.
    """
    for line in sys.stdin:
        lines.put(line.strip())
    lines.put("")
    if busy.is_set():
        os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main()
