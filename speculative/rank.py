"""A rank behind the first as a program: ``python -m speculative.rank FD`` does what it is told through the pipe FD."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from models.errors import CheckpointError
from models.orders import unpacked
from models.sharded_llama import Follower, load_follower
from models.sharding import Part
from speculative.garbage import keep_what_is_loaded
from speculative.ranks import Failure, Order, RankTask, join_group


def main() -> int:
    """Load a part of the target, and follow until rank 0 ends."""
    # A terminal and a service manager tell all processes to stop: rank 0 does so in order, and this one with it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_leader, daemon=True).start()
    connection = Connection(int(sys.argv[1]))
    task: RankTask = connection.recv()
    try:
        follower = _load(task)
        connection.send(None)
        with torch.inference_mode():
            _follow(connection, task, follower)
    except EOFError:  # rank 0 has ended
        return 0
    except Exception as error:
        with contextlib.suppress(OSError):
            connection.send(Failure(str(error)))
            if not isinstance(error, CheckpointError):
                traceback.print_exc()
        return 1


def _end_with_leader() -> None:
    """Standard input ends when rank 0 does, or wants this one to: whatever is under way is of no use then."""
    while os.read(0, 1):
        pass
    os._exit(0)


def _load(task: RankTask) -> Follower:
    torch.set_num_threads(task.num_threads)
    device = torch.device(task.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    follower = load_follower(Path(task.folder), Part(task.rank, task.size), dtype=getattr(torch, task.dtype), device=device)
    keep_what_is_loaded()
    return follower


def _follow(connection: Connection, task: RankTask, follower: Follower) -> NoReturn:
    while True:
        order: Order = connection.recv()
        if order.name == "join":
            join_group(task)
            continue
        if order.data is not None:
            data = torch.frombuffer(bytearray(order.data), dtype=torch.uint8)
        else:
            data = torch.empty(sum(kind.room for kind in order.tensors), dtype=torch.uint8, device=task.device)
            if order.tensors:
                dist.broadcast(data, src=0)
        getattr(follower, order.name)(*order.arguments, *unpacked(data, order.tensors))
        if order.confirmed:
            connection.send(None)


if __name__ == "__main__":
    sys.exit(main())
