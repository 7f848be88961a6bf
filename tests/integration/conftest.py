"""A real server process with the bundled pair."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from filelock import FileLock

from models.compiled import default_cache, unsupported
from models.graph_runner import build_runner, intact, load_runner, runner_path
from models.tiles import has_operators
from speculative.edge_export import export_edge
from speculative.packages import LOCK
from tests.integration.warm import Warm


@dataclass
class Server:
    """A running `moaserve serve`."""

    process: Warm
    base_url: str
    log: list[str]
    reader: threading.Thread

    @property
    def root_url(self) -> str:
        return self.base_url.removesuffix("/v1")

    def metric(self, name: str) -> float:
        """The value of a metric without labels other than the model's."""
        text = httpx.get(f"{self.root_url}/metrics").text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(rf"{name}(\{{|\s)", line))


def start_server(*options: str, module: str = "app.cli", command: str = "serve", port: int = 0) -> Server:
    """Start a server, on a free port or ``port``, and wait until it says that it is ready; ``module`` runs as `moaserve`."""
    # What is drafted shall not depend on how busy the machine is.
    plain = ("--draft-policy", "fixed") if command == "serve" else ()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MOASERVE_")}
    process = Warm(module, [command, "--port", str(port), *plain, *options], environment)
    log: list[str] = []
    for line in process.stdout:
        log.append(line)
        ready = re.search(r"ready at (https?://\S+/v1)", line)
        if ready:
            # Keep reading: a full pipe would stop the server.
            reader = threading.Thread(target=log.extend, args=(process.stdout,), daemon=True)
            reader.start()
            return Server(process, ready.group(1), log, reader)
    process.stdout.close()
    raise AssertionError(f"the server ended with {process.wait()} instead of starting:\n" + "".join(log))


def stop_server(server: Server) -> int:
    """SIGTERM, and its exit code."""
    server.process.terminate()
    code = server.process.wait(timeout=30)
    server.reader.join()
    server.process.stdout.close()
    return code


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The bundled pair in float32, for comparisons that must be exact."""
    server = start_server("--dtype", "float32")
    yield server
    stop_server(server)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an edge needs of the bundled pair, in float32."""
    folder = tmp_path_factory.mktemp("bundle") / "edge"
    export_edge("bundled", "bundled", folder, dtype="float32")
    return folder


@pytest.fixture(scope="module")
def target() -> Iterator[Server]:
    """The server that verifies for edges."""
    server = start_server("--dtype", "float32", "--num-threads", "1")
    yield server
    stop_server(server)


@pytest.fixture(scope="session")
def operators() -> None:
    """Lets this process call the operators that servers do; tests are skipped where there are none."""
    if not has_operators():
        pytest.skip("there are operators for x86 CPUs with AVX2 alone")
    if reason := unsupported(torch.device("cpu")):
        pytest.skip(f"operators are compiled: {reason}")
    cache = default_cache()
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / LOCK):
        if not intact(runner_path(cache)):
            build_runner(runner_path(cache))
    load_runner(runner_path(cache))
