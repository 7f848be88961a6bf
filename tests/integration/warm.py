"""Processes of our programs that need not import the libraries first: Python's fork server has done so, for all of them.

Libraries take most of the time that a program needs to start. What is ours each process imports itself, in the order that it does
anywhere.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

LIBRARIES = [
    "fastapi", "httpx", "limits", "llguidance", "msgspec", "prometheus_client", "pydantic_settings", "safetensors.torch", "torch",
    "torch.export", "transformers", "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto", "typer",
    "uvicorn", "websockets.asyncio.client",
]  # fmt: skip

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(LIBRARIES)


class Warm:
    """As subprocess.Popen has it: ``python -m module``, whose standard output and errors both come from ``stdout``."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        ours, theirs = _processes.Pipe(duplex=False)
        told = (module, list(arguments), dict(environment), theirs)
        self._process = _processes.Process(target=_run, args=told, daemon=True)  # a test that fails leaves nobody to wait for
        self._process.start()
        theirs.close()
        self.stdout = os.fdopen(os.dup(ours.fileno()), encoding="utf-8")
        ours.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.terminate, self.kill = self._process.terminate, self._process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code


def _run(module: str, arguments: list[str], environment: dict[str, str], output: Connection) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    output.close()
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, encoding="utf-8", closefd=False) for number in (1, 2))
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # processes of multiprocessing leave them out
