"""The operator by which compiled graphs multiply with constant weights; see ``tiled_linear.cpp``."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from models.tiles import LIBRARY, TYPES, has_operators

PANEL, _INPUTS = 32, 32
"""Outputs of a panel, and inputs of a step: two tiles of 16 outputs, whose rows hold two inputs of each."""

_LINE = 64
"""Bytes of a cache line."""

LIBRARY.define("tiled_linear(Tensor x, Tensor weight) -> Tensor")


def _rows_by_outputs(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] * PANEL)


torch.library.register_fake("moaserve::tiled_linear", _rows_by_outputs, lib=LIBRARY)

C_SHIMS = {
    torch.ops.moaserve.tiled_linear.default: [
        "AOTITorchError aoti_torch_cpu_tiled_linear(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* out)"
    ]
}
"""How compiled graphs are to call it, for Inductor's ``aot_inductor.custom_ops_to_c_shims``."""


def tiled_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x`` [..., in] and a ``tiled`` weight -> [..., out]. ``graph_runner.load_runner`` must have been called."""
    out: Tensor = torch.ops.moaserve.tiled_linear(x.reshape(-1, x.shape[-1]), weight)
    return out.view(*x.shape[:-1], out.shape[-1])


def tiled(weight: Tensor) -> Tensor:
    """A weight [out, in] as the operator reads it, a panel's tiles by inputs.

    In bfloat16 [out/32, in/32, 2, 16, 16, 2], with both inputs of a pair side by side; in float32 [out/32, in/32, 2, 16, 2, 16].
    A weight in float32 that bfloat16 holds as it is, as most published ones, becomes one in bfloat16: its products with rows in
    float32 are the same to the last bit, and there is half as much to fetch from memory.
    """
    weight = _narrowed(weight) if weight.dtype == torch.float32 else weight
    outputs, inputs = weight.shape
    parts = weight.view(outputs // PANEL, 2, 16, inputs // _INPUTS, 16, 2)
    return parts.permute((0, 3, 1, 4, 5, 2) if weight.dtype == torch.float32 else (0, 3, 1, 4, 2, 5)).contiguous()


def _narrowed(weight: Tensor) -> Tensor:
    """In bfloat16, where that holds all its numbers as they are."""
    narrow = weight.to(torch.bfloat16)
    return narrow if torch.equal(narrow.float(), weight) else weight


def in_one_piece(tensors: Iterable[Tensor], size: int) -> list[Tensor]:
    """Copies of ``tensors``, together at most ``size`` bytes, one behind the other in the order of their use.

    What operators fetch ahead at a weight's end is then the beginning of the next. Each begins with a cache line, as its numbers
    fill whole ones.
    """
    whole = torch.empty(size + _LINE, dtype=torch.uint8)
    end = -whole.data_ptr() % _LINE
    copies = []
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        copies.append(whole[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor))
    return copies


def put_in_order(tensors: list[Tensor], order: Iterable[int]) -> None:
    """Replace the ``tensors`` of these numbers by copies ``in_one_piece``."""
    chosen = list(order)
    copies = in_one_piece((tensors[index] for index in chosen), sum(tensors[index].nbytes for index in chosen))
    for index, copy in zip(chosen, copies, strict=True):
        tensors[index] = copy


def suits(weight: Tensor) -> bool:
    """Whether this CPU has what the operator is for, and it takes a weight [out, in] of this type and these sizes.

    One on the meta device, whose numbers are still to be read, is taken for the CPU's.
    """
    outputs, inputs = weight.shape
    fits = outputs % PANEL == 0 and inputs % _INPUTS == 0
    return has_operators() and weight.dtype in TYPES and weight.device.type in ("cpu", "meta") and fits
