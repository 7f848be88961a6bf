"""Networks of the kernel's, where it has them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from benchmarks.network.links import Link
from benchmarks.network.namespaces import Namespace, unavailable

pytestmark = pytest.mark.integration


def need(*, shaped: bool) -> None:
    reason = unavailable(shaped=shaped)
    if reason is not None:
        pytest.skip(f"no such network here: {reason}")


def served(network: Namespace, folder: Path) -> float:
    """Seconds for a file from the server's side."""
    command = network.command(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", network.address, "--directory", str(folder)]
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().split("port ")[1].split()[0]
            with httpx.Client() as client:
                client.get(f"http://{network.address}:{port}/")
                began = time.perf_counter()
                assert client.get(f"http://{network.address}:{port}/file").content == bytes(100_000)
                return time.perf_counter() - began
        finally:
            server.terminate()


def test_a_server_in_a_namespace_answers_and_its_bytes_are_counted(tmp_path: Path) -> None:
    need(shaped=False)
    (tmp_path / "file").write_bytes(bytes(100_000))
    with Namespace() as network:
        network.shape(Link("free"))
        before = network.traffic
        served(network, tmp_path)
        traffic = network.traffic - before
        # TCP sends some of it twice where a busy machine is slow to answer.
        assert 100_000 < traffic.down < 150_000 and traffic.wire_down > traffic.down
        assert 0 < traffic.up < 2_000
    assert not Path("/run/netns", network.command([])[3]).exists()


def test_what_a_killed_process_left_behind_goes() -> None:
    need(shaped=False)
    script = "import os; from benchmarks.network.namespaces import Namespace; Namespace().__enter__(); os.kill(os.getpid(), 9)"
    killed = subprocess.Popen([sys.executable, "-c", script])
    killed.wait()
    left = Path("/run/netns", f"moaserve-net-{killed.pid}")
    assert left.exists()
    with Namespace():
        assert not left.exists()


def test_it_goes_when_something_fails_within() -> None:
    need(shaped=False)
    with pytest.raises(ZeroDivisionError), Namespace() as network:
        _ = 1 / 0
    assert not Path("/run/netns", network.command([])[3]).exists()


def test_netem_delays(tmp_path: Path) -> None:
    need(shaped=True)
    (tmp_path / "file").write_bytes(bytes(100_000))
    with Namespace() as network:
        network.shape(Link("slow", rtt=0.1, rate=10e6))
        assert served(network, tmp_path) > 0.1 + 0.08
