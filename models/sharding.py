"""Which part of a target's weights each of several processes holds: whole KV heads, and stretches of the MLP and the vocabulary.

A rank's part is a decoder layer of its own with fewer heads and a narrower MLP. What its ``output`` and ``mlp.down`` give is summed
over ranks (Megatron-LM, arXiv 1909.08053). Placements are those of ``torch.distributed.tensor``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from models.config import DecoderConfig
from models.errors import CheckpointError
from models.loader import tensor_files

PLACEMENTS: Mapping[str, Placement] = {
    "q_proj.weight": Shard(0),
    "q_proj.bias": Shard(0),
    "k_proj.weight": Shard(0),
    "k_proj.bias": Shard(0),
    "v_proj.weight": Shard(0),
    "v_proj.bias": Shard(0),
    "o_proj.weight": Shard(1),
    "o_proj.bias": Partial(),
    "gate_proj.weight": Shard(0),
    "gate_proj.bias": Shard(0),
    "up_proj.weight": Shard(0),
    "up_proj.bias": Shard(0),
    "down_proj.weight": Shard(1),
    "down_proj.bias": Partial(),
}
"""Where a checkpoint's tensors go, by how their names end; others are replicated. Query heads stand there in order of KV heads."""


@dataclass(frozen=True, slots=True)
class Part:
    """The ``rank``-th of ``size`` parts; rank 0 leads."""

    rank: int
    size: int

    def of(self, length: int) -> slice:
        """Its stretch of ``length``, which it divides."""
        each = length // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def of_vocabulary(self, count: int) -> slice:
        """Its stretch of so many tokens; the last one's is shorter where they cannot be divided."""
        each = vocabulary_part(count, self.size)
        return slice(min(self.rank * each, count), min((self.rank + 1) * each, count))


def vocabulary_part(count: int, size: int) -> int:
    """Rows of the LM head that each of ``size`` ranks computes; the last ones' may be of no token."""
    return -(-count // size)


def sharded(config: DecoderConfig, size: int) -> DecoderConfig:
    """The sizes of one rank's layers; raises CheckpointError where ``size`` ranks cannot share them."""
    for name, count in (("num_key_value_heads", config.num_kv_heads), ("intermediate_size", config.intermediate_size)):
        if count % size:
            raise CheckpointError(f"--tensor-parallel-size {size} does not divide the model's {name} ({count}); {_choices(config)}")
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
    )


def _choices(config: DecoderConfig) -> str:
    fitting = [n for n in range(1, config.num_kv_heads + 1) if not (config.num_kv_heads % n or config.intermediate_size % n)]
    return f"it can be {', '.join(map(str, fitting))}"


class ShardedTensors(Mapping[str, Tensor]):
    """A checkpoint of which each tensor, when it is asked for, is one rank's part; nothing else is read. To be closed."""

    def __init__(self, folder: Path, part: Part) -> None:
        self._part, self._stack = part, ExitStack()
        self._files: dict[str, Any] = {}
        for path in tensor_files(folder):
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                self.close()
                raise CheckpointError(f"{path} is damaged ({error}); fetch it again") from error
            self._files.update(dict.fromkeys(file.keys(), file))

    def close(self) -> None:
        """Close the files."""
        self._stack.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: object) -> bool:
        """Nothing is read for it, as Mapping would."""
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        placement = PLACEMENTS.get(".".join(name.split(".")[-2:]), Replicate())
        file = self._files[name]
        if isinstance(placement, Shard):
            whole = file.get_slice(name)
            place = self._part.of(whole.get_shape()[placement.dim])
            part: Tensor = whole[place] if placement.dim == 0 else whole[:, place]
            return part
        tensor: Tensor = file.get_tensor(name)
        return torch.zeros_like(tensor) if isinstance(placement, Partial) and self._part.rank else tensor

    def rows(self, name: str, rows: slice) -> Tensor:
        """Some rows of a tensor."""
        part: Tensor = self._files[name].get_slice(name)[rows]
        return part


@dataclass(frozen=True, slots=True)
class Layout:
    """How a fused weight of ours is shared: ``dim`` taken for several of ``sizes``, the ``axis``-th of which is divided."""

    dim: int
    sizes: tuple[int, ...]
    axis: int

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The weight's dimensions, that one taken apart."""
        return (*whole[: self.dim], *self.sizes, *whole[self.dim + 1 :])

    def join(self, parts: list[Tensor]) -> Tensor:
        """The ranks' parts -> the whole weight."""
        apart = (*self.sizes[: self.axis], -1, *self.sizes[self.axis + 1 :])
        joined = torch.cat([part.unflatten(self.dim, apart) for part in parts], dim=self.dim + self.axis)
        return joined.flatten(self.dim, self.dim + len(self.sizes) - 1)


def layout_of(name: str, config: DecoderConfig) -> Layout | None:
    """That of a layer's weight (by our name) in a whole model of sizes ``config``; None where rank 0 has it whole.

    Query heads are group-major, so that the heads of a rank's KV heads are a stretch of one axis.
    """
    kind = name.removesuffix(".weight").removesuffix(".bias")
    heads = config.num_kv_heads, config.head_dim
    if kind.endswith("qkv"):
        return Layout(0, (config.groups + 2, *heads), 1)
    if kind.endswith("mlp.gate_up"):
        return Layout(0, (2, config.intermediate_size), 1)
    if name.endswith("output.weight"):
        return Layout(1, (config.groups, *heads), 1)
    if name.endswith("mlp.down.weight"):
        return Layout(1, (config.intermediate_size,), 0)
    return None


def own_places(places: Tensor, shape: tuple[int, ...], axis: int, part: Part) -> tuple[Tensor, Tensor]:
    """Flat ``places`` [n] in a whole weight of ``shape`` whose ``axis`` is divided: which are in ``part``, and where there."""
    coordinates = list(torch.unravel_index(places, shape))
    each = shape[axis] // part.size
    own = coordinates[axis] // each == part.rank
    coordinates[axis] = coordinates[axis] % each
    local = torch.zeros_like(places)
    for number, length in enumerate((*shape[:axis], each, *shape[axis + 1 :])):
        local = local * length + coordinates[number]
    return own, local
