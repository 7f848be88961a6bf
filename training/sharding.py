"""A frozen target whose layers are spread over the processes: each holds a part, and gathers a layer while it runs (FSDP)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from models.llama import Llama
from training.errors import ConfigError

_Loaded = TypeVar("_Loaded")


def shard(target: Llama, mesh: DeviceMesh) -> Llama:
    """Spread the decoder layers of a frozen target, whole in each process, over the mesh's devices; the same module.

    Embeddings, final norm and LM head stay whole: drafters use them outside of the target's passes. From then on all processes must
    run ``encode`` and borrowed layers equally often.
    """
    ends = {*target.embedding.parameters(), *target.norm.parameters(), *target.lm_head.parameters()}
    for end in (target.embedding, target.norm, target.lm_head):
        end.to(mesh.device_type)
    if target.config.tie_word_embeddings:
        target.tie_embeddings()
    for layer in target.layers:
        fully_shard(layer, mesh=mesh)
    # The root does nothing itself but fetch the next layer while one runs.
    fully_shard(target, mesh=mesh, ignored_params={*ends, *target.lm_head.parameters()})
    register_fsdp_forward_method(target, "encode")
    return target


def load_sharded(load: Callable[[torch.device], tuple[Llama, _Loaded]], accelerator: Accelerator) -> tuple[Llama, _Loaded]:
    """``load`` a target into main memory, one process of a machine after another, and keep this process's shard on its device."""
    if accelerator.num_processes == 1:
        raise ConfigError("--shard-target spreads the target over several processes: start them with accelerate launch --multi_gpu")
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    loaded: tuple[Llama, _Loaded] | None = None
    for turn in range(accelerator.num_processes):
        if turn == accelerator.local_process_index:
            target, rest = load(torch.device("cpu"))
            loaded = shard(target, mesh), rest
        accelerator.wait_for_everyone()
    assert loaded is not None
    return loaded
