"""Finding what memory an engine takes: the sizes that ``memory`` plans with."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch
from torch import nn

from models.llama import Llama
from models.tiled_decoder import suits_whole
from speculative.engine import Engine
from speculative.grammar import KEPT_BYTES
from speculative.memory import MemoryNeeds

COMPILED_COPIES = 2
"""Copies of weights that compiled graphs keep: as constants of their library, and laid out for the CPU."""

_SCRATCH = 192 * 2**20
"""What PyTorch, oneDNN and the allocator keep between steps, compiled code among it."""

_ROUNDED = 16 * 2**20
"""The process's own size varies by some pages; what fits beside it shall not."""


KERNELS_KEPT = 128
"""Products that PyTorch and oneDNN keep prepared, of each size a text's rows have had; by themselves 1,024, which are 0.5 GB."""


def keep_few_kernels() -> None:
    """Bound what is kept for sizes that may come again, unless the environment does; before the first product."""
    for variable in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(variable, str(KERNELS_KEPT))


def resident_bytes(pid: int | None = None) -> int | None:
    """Memory that a process, or this one, has now; None where the system does not tell."""
    try:
        for line in Path(f"/proc/{pid or 'self'}/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def free_bytes(device: torch.device, resident: int | None) -> int | None:
    """What an engine may take that shares the machine, or the GPU, with what else runs there; None where the system does not tell.

    ``resident`` is what this process has of it already. A tenth is left to others, and to what an engine takes for a moment.
    """
    if device.type == "cuda":
        size = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    elif (available := _available_bytes()) is None or resident is None:
        return None
    else:
        size = min(available + resident, _container_bytes() or available + resident)
    return size * 9 // 10


def _available_bytes() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _container_bytes() -> int | None:
    """What a container may take, by either version of Linux's control groups."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            return int((Path("/sys/fs/cgroup") / name).read_text(encoding="ascii"))
    return None


def weight_bytes(*modules: nn.Module | None) -> int:
    """Bytes of the networks' weights, those that they share once."""
    tensors = {tensor.data_ptr(): tensor.nbytes for module in modules if module is not None for tensor in module.parameters()}
    return sum(tensors.values())


def memory_needs(engine: Engine, network: nn.Module | None, resident: int | None, *, compiled: bool) -> MemoryNeeds:
    """What ``engine`` with the drafter's ``network`` needs; ``resident`` was measured once their weights were loaded.

    On a GPU nothing but its own memory is counted.
    """
    target = engine.target
    weights, drafter_weights = weight_bytes(target), weight_bytes(target, network) - weight_bytes(target)
    on_cpu = target.device.type == "cpu"
    process = 0 if not on_cpu or resident is None else max(0, -(-(resident - weights - drafter_weights) // _ROUNDED) * _ROUNDED)
    drafter_caches = () if engine.drafter is None else tuple(engine.drafter.caches)
    kept = sum(cache.num_layers * cache.data.shape[-1] * cache.data.element_size() for cache in (engine.cache, *drafter_caches))
    return MemoryNeeds(
        process=process,
        weights=weights,
        drafter_weights=drafter_weights,
        copies=_copies(engine, network, drafter_weights, compiled=compiled) if on_cpu else 0,
        working=_working(engine, engine.scheduler.budget.most) + (_SCRATCH + KEPT_BYTES if on_cpu else 0),
        working_sequence=_working(engine, engine.cache.scratch) + engine.cache.scratch * target.config.vocab_size * 2 * 4,
        sequence=engine.cache.nbytes // engine.cache.num_slots,
        drafter_sequence=sum(cache.nbytes // cache.num_slots for cache in drafter_caches),
        kept_token=kept,
    )


def _copies(engine: Engine, network: nn.Module | None, drafter_weights: int, *, compiled: bool) -> int:
    """Weights that are kept in two layouts; those of the target's layers are released once they have another."""
    target = engine.target
    layers = weight_bytes(target.layers)
    if not compiled:
        return weight_bytes(target) + drafter_weights - layers if target.dtype == torch.bfloat16 else 0
    # What operators have of layers is in the place of what was loaded.
    of_drafter = COMPILED_COPIES * drafter_weights
    if isinstance(network, Llama) and suits_whole(network):
        of_drafter = weight_bytes(network.lm_head)
    if suits_whole(target):
        return weight_bytes(target.lm_head) + of_drafter
    return COMPILED_COPIES * weight_bytes(target) - layers + of_drafter


def _working(engine: Engine, rows: int) -> int:
    """Activations of so many rows, and their masks: with the truths that these are made of, and their comparisons."""
    config = engine.target.config
    activations = rows * (6 * config.hidden_size + 4 * config.intermediate_size) * 4
    return activations + rows * config.groups * engine.cache.rows_per_slot * (engine.target.dtype.itemsize + 2)
