"""Weights as 8-bit integers, one scale for each output: half of bfloat16's bytes, on disk and in memory.

Only weights are quantized, symmetrically, and never made larger again as a whole on a CPU: PyTorch's kernel for such products
reads them as they are. It multiplies bfloat16 numbers; what comes and goes in another type is rounded to that on the way, which is
a third of the error that the weights have anyway.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers import Linear

LARGEST = 127
_ALIGNED = 32
"""PyTorch's kernels read so many bytes at a time, from addresses that it must divide: anything else ends the process."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight [out, in] -> integers of the same shape and scales [out] in bfloat16; together they are off by half a scale."""
    weight = weight.detach().float()
    scales = (weight.abs().amax(dim=1) / LARGEST).to(torch.bfloat16)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    # Rounded first, so that what scales lose is no error of the weights.
    return (weight / scales.float().unsqueeze(1)).round().clamp(-LARGEST, LARGEST).to(torch.int8), scales


class Int8Linear(Linear):
    """``Linear`` with a weight that ``quantize`` gave: ``weight`` int8 [out, in] and ``scales`` bfloat16 [out].

    What it is given and gives is of type ``dtype``. For inference alone.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, dtype: torch.dtype = torch.float32) -> None:
        nn.Module.__init__(self)  # Linear's own makes a weight of other numbers
        self.weight: Tensor  # type: ignore[assignment]  # a buffer, where Linear has a parameter
        self.scales: Tensor
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=torch.int8))
        self.register_buffer("scales", torch.ones(out_features, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.zeros(out_features, dtype=dtype), requires_grad=False) if bias else None
        self._dtype = dtype

    @property
    def dtype(self) -> torch.dtype:
        """As in Linear."""
        return self._dtype

    def pack(self) -> None:
        """Nothing to do: the kernel reads rows as they are."""
        return None

    def rows(self, index: Tensor) -> Tensor:
        """As in Linear."""
        return F.embedding(index, self.weight).to(self._dtype) * self.scales[index].to(self._dtype).unsqueeze(-1)

    def select(self, index: Tensor) -> Linear:
        """As in Linear."""
        selected = Int8Linear(self.weight.shape[1], len(index), dtype=self._dtype)
        selected.weight, selected.scales = self.weight[index], self.scales[index]
        return selected

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return self._product(x, slice(None))

    def part(self, x: Tensor, outputs: slice) -> Tensor:
        """As in Linear."""
        return self._product(x, outputs)

    def _product(self, x: Tensor, outputs: slice) -> Tensor:
        weight, scales = self.weight[outputs], self.scales[outputs]
        if x.device.type == "cpu" and weight.shape[1] % _ALIGNED == 0:
            rows = _aligned(x.reshape(-1, x.shape[-1]).to(torch.bfloat16).contiguous())
            out: Tensor = torch.ops.aten._weight_int8pack_mm(rows, _aligned(weight), scales).to(x.dtype)
            out = out.view(*x.shape[:-1], len(weight))
        else:
            out = F.linear(x, weight.to(x.dtype)) * scales.to(x.dtype)
        return out if self.bias is None else out + self.bias[outputs]


def _aligned(x: Tensor) -> Tensor:
    """The same, in memory of its own where it begins at an odd address."""
    return x.clone() if x.data_ptr() % _ALIGNED else x


def with_int8_weights(network: nn.Module, dtype: torch.dtype) -> None:
    """Put an ``Int8Linear`` in the place of every Linear; what they hold is to be loaded. Places that share one still do."""
    made: dict[Linear, Int8Linear] = {}
    for parent in list(network.modules()):
        for name, child in parent.__dict__["_modules"].items():
            if isinstance(child, Linear) and not isinstance(child, Int8Linear):
                outputs, inputs = child.weight.shape
                if child not in made:
                    made[child] = Int8Linear(inputs, outputs, bias=child.bias is not None, dtype=dtype)
                setattr(parent, name, made[child])
