"""The processes that compute with this one where a target is shared (--tensor-parallel-size): started, told, watched, ended.

Orders go through a pipe to each process, so that nobody waits in a collective while there is nothing to do, and a process that
ends is noticed at once; tensors go through the process group, or on a CPU, where they are small, along with the order.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Pipe
from pathlib import Path
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from models.orders import TensorKind, kinds, packed
from speculative.errors import EngineLoadError, EngineLostError

logger = logging.getLogger("moaserve.engine")

PATIENCE = timedelta(seconds=60)
"""What one rank waits for another in the middle of a computation, all of whose parts take the same time."""

LARGEST_TOLD = 2**16
"""Bytes of tensors that go through the pipe: so much it holds though nobody reads it."""

_NOTICED_S = 2.0
"""After a failed computation, how long is waited to hear that a process has ended, which says more."""

_ENDING_S = 5.0


@dataclass(frozen=True, slots=True)
class RankTask:
    """What a rank is to be: the ``rank``-th of ``size``, with its part of the checkpoint in ``folder``."""

    rank: int
    size: int
    folder: str
    dtype: str
    device: str
    backend: str
    num_threads: int
    rendezvous: str


@dataclass(frozen=True, slots=True)
class Order:
    """A ``Follower``'s method with its arguments; tensors of ``tensors`` come as ``data``, or by broadcast where that is None."""

    name: str
    arguments: tuple[object, ...]
    tensors: tuple[TensorKind, ...]
    data: bytes | None
    confirmed: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank says when it cannot go on."""

    message: str


def join_group(task: RankTask) -> None:
    """Become a member of the group that computes together."""
    device = torch.device(task.device)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nobody outside is to reach what ranks say to one another
    dist.init_process_group(
        task.backend,
        init_method=f"file://{task.rendezvous}",
        rank=task.rank,
        world_size=task.size,
        timeout=PATIENCE,
        device_id=device if task.backend == "nccl" else None,
    )


class _Rank:
    """One process, with the thread that hears it."""

    def __init__(self, task: RankTask) -> None:
        self.task = task
        self.connection, theirs = Pipe()
        with theirs:
            # It ends when its standard input does, so with this process however that ends.
            self.process = subprocess.Popen(
                [sys.executable, "-m", "speculative.rank", str(theirs.fileno())], stdin=subprocess.PIPE, pass_fds=[theirs.fileno()]
            )
        self.answers: SimpleQueue[Failure | None] = SimpleQueue()
        self.listener: threading.Thread | None = None
        self.connection.send(task)

    @property
    def described(self) -> str:
        """In words."""
        return f"tensor-parallel rank {self.task.rank} of {self.task.size} (process {self.process.pid})"

    def hear(self) -> Failure:
        """Pass on what it answers until it has ended; why it has."""
        said: Failure | None = None
        with contextlib.suppress(EOFError, OSError):
            while said is None:
                said = self.connection.recv()
                if said is None:
                    self.answers.put(None)
        code = self.process.wait()
        how = f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"
        return said or Failure(how)

    def end(self) -> None:
        """End the process, by force where it does not by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.listener is not None:
            self.listener.join()
        self.connection.close()


class Ranks:
    """Ranks 1 … of as many as there are ``tasks``; this process is rank 0, with the first task. Orders come from one thread.

    ``lost`` says what has happened to one of them once nothing can be computed any more; ``when_lost`` is called then, once, from
    whichever thread notices.
    """

    def __init__(self, tasks: Sequence[RankTask], folder: tempfile.TemporaryDirectory[str]) -> None:
        self.size = len(tasks)
        self.lost: str | None = None
        self.when_lost: Callable[[], None] = lambda: None
        self._task, self._folder = tasks[0], folder
        self._noticed = threading.Event()
        self._ending = self._joined = False
        self._others: list[_Rank] = []
        atexit.register(self.close)
        for task in tasks[1:]:
            rank = _Rank(task)
            self._others.append(rank)
            rank.listener = threading.Thread(target=self._listen, args=(rank,), name=f"moaserve-rank-{task.rank}", daemon=True)
            rank.listener.start()

    @classmethod
    def start(cls, size: int, folder: Path, *, dtype: torch.dtype, device: torch.device, num_threads: int) -> Ranks:
        """Start ``size`` − 1 processes, which load their parts meanwhile; raises EngineLoadError."""
        if dist.is_initialized():
            raise EngineLoadError(
                f"--tensor-parallel-size {size}: this process takes part in another distributed computation; use one of its own"
            )
        place = tempfile.TemporaryDirectory(prefix="moaserve-ranks-")
        kind = str(dtype).removeprefix("torch.")
        tasks = [
            RankTask(
                rank=rank,
                size=size,
                folder=str(folder),
                dtype=kind,
                device=f"cuda:{rank}" if device.type == "cuda" else str(device),
                backend="nccl" if device.type == "cuda" else "gloo",
                num_threads=num_threads,
                rendezvous=str(Path(place.name) / "store"),
            )
            for rank in range(size)
        ]
        return cls(tasks, place)

    def join(self) -> None:
        """Wait until all have loaded their parts, and form the group; raises EngineLostError."""
        self._confirm()
        with self.order("join"):
            join_group(self._task)
            self._joined = True

    @contextlib.contextmanager
    def order(self, name: str, *arguments: object, tensors: Sequence[Tensor] = (), confirmed: bool = False) -> Iterator[None]:
        """As in models.orders.Orders; raises EngineLostError."""
        try:
            if self.lost is not None:
                raise EngineLostError(self.lost)
            self._tell(name, arguments, tensors, confirmed)
            yield
            if confirmed:
                self._confirm()
        except EngineLostError:
            raise
        except Exception as error:
            # Whatever it was, the others may be in the middle of a computation that this one has left.
            self._noticed.wait(_NOTICED_S)
            self._lose(f"computing with {self.size} processes (--tensor-parallel-size) failed: {error}")
            raise EngineLostError(self.lost) from error

    def _tell(self, name: str, arguments: tuple[object, ...], tensors: Sequence[Tensor], confirmed: bool) -> None:
        data = packed(tensors) if tensors else None
        told = data is not None and data.device.type == "cpu" and data.nbytes <= LARGEST_TOLD
        content = data.numpy().tobytes() if told and data is not None else None
        order = Order(name, arguments, tuple(kinds(tensors)), content, confirmed)
        for rank in self._others:
            rank.connection.send(order)
        if data is not None and not told:
            dist.broadcast(data, src=0)

    def _confirm(self) -> None:
        """Wait until all have answered."""
        for rank in self._others:
            answer = rank.answers.get()
            if answer is not None:
                raise EngineLostError(f"{rank.described}: {answer.message}")

    def _listen(self, rank: _Rank) -> None:
        failure = rank.hear()
        if not self._ending:
            self._lose(f"{rank.described} cannot go on: {failure.message}")
            self._noticed.set()
        rank.answers.put(failure)

    def _lose(self, message: str) -> None:
        if self.lost is None and not self._ending:
            self.lost = message
            if self._joined:
                logger.error("%s; nothing can be computed any more: start anew", message)
            self.when_lost()

    def close(self) -> None:
        """End all processes; more than once is once."""
        if self._ending:
            return
        self._ending = True
        atexit.unregister(self.close)
        for rank in self._others:
            rank.end()
        # NCCL waits for those that are gone.
        if self._joined and not (self.lost and self._task.backend == "nccl"):
            dist.destroy_process_group()
        self._folder.cleanup()
