"""A target that several processes share: from an EngineConfig to rank 0's part and the processes with the others."""

from __future__ import annotations

from pathlib import Path

import torch

from models.loader import target_config
from models.sharded_llama import LeadingLlama, load_leading
from models.sharding import sharded
from speculative.config import EngineConfig
from speculative.errors import EngineLoadError
from speculative.ranks import Ranks


def first_device(config: EngineConfig, device: torch.device) -> torch.device:
    """Where rank 0 computes; raises EngineLoadError where there is no GPU for each of the others."""
    if device.type != "cuda":
        return device
    size = config.tensor_parallel_size
    if device.index:
        raise EngineLoadError(
            f"--device {config.device} is one GPU; --tensor-parallel-size {size} takes the first {size}: --device cuda"
        )
    if torch.cuda.device_count() < size:
        raise EngineLoadError(
            f"--tensor-parallel-size {size} takes a GPU for each process, this machine has {torch.cuda.device_count()}; "
            "see CUDA_VISIBLE_DEVICES, or lower it"
        )
    return torch.device("cuda", 0)


def start_ranks(config: EngineConfig, folder: Path, dtype: torch.dtype, device: torch.device) -> Ranks:
    """The other processes, which begin to load their parts of the checkpoint in ``folder``.

    Threads of a CPU are shared out, unless the config says how many each process has. Raises EngineLoadError, CheckpointError.
    """
    size = config.tensor_parallel_size
    sharded(target_config(folder), size)  # whether they can share it is to be known before any of them starts
    threads = config.num_threads or max(1, torch.get_num_threads() // size)
    torch.set_num_threads(threads)
    return Ranks.start(size, folder, dtype=dtype, device=device, num_threads=threads)


def load_shared(folder: Path, ranks: Ranks, dtype: torch.dtype, device: torch.device) -> LeadingLlama:
    """Rank 0's part of the target, once the others have theirs; raises CheckpointError, EngineLostError."""
    target = load_leading(folder, ranks.size, dtype=dtype, device=device)
    target.orders = ranks
    ranks.join()
    return target
