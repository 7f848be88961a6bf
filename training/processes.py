"""Several processes that train together: what must hold, who speaks, and the end."""

from __future__ import annotations

import os

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from training.errors import ConfigError

WRAPPED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
"""What `accelerate` may be set up as that keeps weights in ways that the trainer's checkpoints do not know."""


def check(accelerator: Accelerator, accumulate: int) -> None:
    """Raise ConfigError where an update cannot be divided, or where `accelerate` is told to do what the trainer does itself."""
    if accelerator.distributed_type in WRAPPED:
        raise ConfigError(
            f"accelerate is set up for {accelerator.distributed_type.value}: start plain processes "
            "(accelerate launch --multi_gpu), and shard a large target with --shard-target"
        )
    world = accelerator.num_processes
    if accumulate % world:
        raise ConfigError(
            f"--accumulate {accumulate}: the batches of an update cannot be divided among {world} processes; "
            f"say --accumulate {-(-accumulate // world) * world}, or another multiple of {world}"
        )


def is_main() -> bool:
    """Whether this process is the one that reports; launchers number them in the environment."""
    return int(os.environ.get("RANK", "0")) == 0


def leave() -> None:
    """Take leave of the other processes, where there are any."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
