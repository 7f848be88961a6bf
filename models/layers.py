"""Linear, RMSNorm, MLP, rotary embedding and the pre-norm decoder layer that targets and drafters share.

Rows of a batch are flattened: activations are [n, E]. Query heads are kept *group-major*: head ``g·n_kv + k`` is the g-th query
head of KV head k, so that the queries of one KV head line up for grouped attention without a copy. ``models.loader`` permutes
checkpoints on the way in and out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.rope import RopeConfig, frequencies
from models.tiled_linear import suits, tiled, tiled_linear

Rope = tuple[Tensor, Tensor]
"""Cosines and signed sines of the rows' positions, each [n, 1, 2, d/2]."""

Attend = Callable[[Tensor, Tensor], Tensor]
"""From rotated queries [n, h·d], and rotated keys with values [n, 2·n_kv·d], to attended values [n, h·d]."""


def draw(weight: Tensor, std: float = 0.02) -> None:
    """Fill a new weight with normal numbers, unless it is but a shape (on the meta device): PyTorch loads its compiler for that."""
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


class Linear(nn.Module):
    """``x @ weight.T (+ bias)``, with the weight packed once for inference where oneDNN or MKL gains from it."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self._packed: Tensor | None = None
        self._tiles: Tensor | None = None
        draw(self.weight)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the numbers that it is given and gives."""
        return self.weight.dtype

    def rows(self, index: Tensor) -> Tensor:
        """Rows ``index`` [...] of the weight [..., in]: it may be a table of embeddings too."""
        return F.embedding(index, self.weight)

    def select(self, index: Tensor) -> Linear:
        """One with the outputs ``index`` [n] alone, for inference."""
        selected = Linear(self.weight.shape[1], len(index)).requires_grad_(False)
        selected.weight = nn.Parameter(self.weight[index], requires_grad=False)
        return selected

    def part(self, x: Tensor, outputs: slice) -> Tensor:
        """x [n, in] -> some of its outputs alone."""
        return F.linear(x, self.weight[outputs], self.bias[outputs] if self.bias is not None else None)

    def pack(self) -> None:
        """Prepare for inference on a CPU.

        bfloat16 weights are reordered into oneDNN's blocked layout, which saves a copy of the weight per product (1.3x to 2x for
        one to 32 rows with AMX). float32 weights that widen are stored transposed, which MKL multiplies faster by a few rows.
        """
        if self.weight.device.type != "cpu":
            return
        weight = self.weight.detach()
        if weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
        elif weight.dtype == torch.float32 and weight.shape[0] >= weight.shape[1]:
            self.weight.data = weight.t().contiguous().t()

    @property
    def packed(self) -> bool:
        """Whether ``pack`` has made a copy, so that ``forward`` needs no more than that."""
        return self._packed is not None

    def tile(self) -> None:
        """Prepare for being compiled, where this CPU and the weight suit ``tiled_linear``."""
        if suits(self.weight):
            self._tiles = tiled(self.weight.detach())

    def release(self) -> None:
        """Give back the weight as it was loaded, where ``forward`` has another or something else stands in for it."""
        self.weight.data = self.weight.data.new_empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """x [n, in] -> [n, out]."""
        if self._tiles is not None:
            product = tiled_linear(x, self._tiles)
            return product if self.bias is None else product + self.bias
        if self._packed is not None:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return out
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps
        self._doubled: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., E] -> the same shape and type."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or x.device.type != "cpu":
            if not torch.compiler.is_compiling():
                self._doubled = None  # whoever trains changes weights
            out: Tensor = F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
            return out
        # On a CPU PyTorch's rms_norm is a chain of eight operations, its layer_norm is one, and the two agree on (x, −x): the mean
        # is 0 and the variance the mean of x². It takes 6% off a verification and off a drafted level of the bundled pair.
        if self._doubled is None or self._doubled.dtype != x.dtype:
            self._doubled = self.weight.detach().to(x.dtype).repeat(2)
        size = x.shape[-1]
        both = F.layer_norm(torch.cat((x, x.neg()), dim=-1), (2 * size,), self._doubled, None, self.eps)
        return both.narrow(-1, 0, size)

    def reorder(self, order: Tensor) -> None:
        """Take inputs whose elements stand in another order: element i is what was element ``order[i]``."""
        self.weight.copy_(self.weight[order])
        self._doubled = None


class MLP(nn.Module):
    """SwiGLU with the gate and up projections fused."""

    def __init__(self, size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = Linear(size, 2 * intermediate_size, bias=bias)
        self.down = Linear(intermediate_size, size, bias=bias)
        self.intermediate_size = intermediate_size

    def forward(self, x: Tensor) -> Tensor:
        """x [n, E] -> [n, E]."""
        gate, up = self.gate_up(x).split(self.intermediate_size, dim=-1)
        out: Tensor = self.down(F.silu(gate).mul_(up) if not torch.is_grad_enabled() else F.silu(gate) * up)
        return out


class RotaryTable(nn.Module):
    """Cosines and sines of all positions, grown on demand."""

    def __init__(self, head_dim: int, config: RopeConfig) -> None:
        super().__init__()
        self.head_dim, self.config = head_dim, config
        self._cos = torch.empty(0)
        self._sin = torch.empty(0)

    def reserve(self, length: int, like: Tensor) -> None:
        """Make positions 0…length−1 available in the type and on the device of ``like``."""
        if len(self._cos) >= length and self._cos.dtype == like.dtype and self._cos.device == like.device:
            return
        positions = torch.arange(max(length, 64), dtype=torch.float32)
        angles = torch.outer(positions, frequencies(self.head_dim, self.config).float())
        cos, sin = (each * self.config.attention_factor for each in (angles.cos(), angles.sin()))
        self._cos = torch.stack((cos, cos), 1).unsqueeze(1).to(like)
        self._sin = torch.stack((-sin, sin), 1).unsqueeze(1).to(like)

    def __len__(self) -> int:
        """How many positions are available."""
        return len(self._cos)

    def forward(self, positions: Tensor) -> Rope:
        """Positions [n], already reserved, -> cosines and signed sines [n, 1, 2, d/2]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Apply RoPE to x [n, heads, d] (a view whose heads are dense): in place, or to a copy where a graph is compiled."""
    halves = x.unflatten(-1, (2, x.shape[-1] // 2))
    if torch.compiler.is_compiling():
        # A flip becomes a loop over single elements there; sums of halves become vector instructions.
        (first, second), (cos, _), (minus_sin, sin) = (pair.unbind(-2) for pair in (halves, *rope))
        return torch.cat((first * cos + second * minus_sin, second * cos + first * sin), dim=-1)
    swapped = halves.flip(-2)
    halves.mul_(rope[0]).addcmul_(swapped, rope[1])
    return x


class DecoderLayer(nn.Module):
    """A pre-norm Llama layer: attention and SwiGLU, each with a residual.

    How rows attend to one another is the caller's: ``attend`` gets rotated queries, keys and values.
    """

    def __init__(
        self,
        size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        intermediate_size: int,
        eps: float,
        *,
        attention_bias: bool = False,
        output_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.q_size, self.kv_size = num_heads * head_dim, 2 * num_kv_heads * head_dim
        self.input_norm = RMSNorm(size, eps)
        self.qkv = Linear(size, self.q_size + self.kv_size, bias=attention_bias)
        self.q_norm = RMSNorm(head_dim, eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps) if qk_norm else None
        self.output = Linear(self.q_size, size, bias=output_bias)
        self.mlp_norm = RMSNorm(size, eps)
        self.mlp = MLP(size, intermediate_size, bias=mlp_bias)

    def forward(self, x: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """x [n, E] -> [n, E]."""
        return self.finish(x, attend(*self.project(self.input_norm(x), rope)))

    def project(self, normed: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Normed rows [n, E] -> rotated queries [n, h·d], and rotated keys beside values [n, 2·n_kv·d]."""
        qkv: Tensor = self.qkv(normed)
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        sizes = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys, values = heads.split(sizes, dim=1)
            heads = torch.cat((self.q_norm(queries), self.k_norm(keys), values), dim=1)
            qkv = heads.flatten(1)
        if torch.compiler.is_compiling():
            queries, keys, values = heads.split(sizes, dim=1)
            return rotate(queries, rope).flatten(1), torch.cat((rotate(keys, rope), values), dim=1).flatten(1)
        rotate(heads[:, : self.num_heads + self.num_kv_heads], rope)
        return qkv[:, : self.q_size], qkv[:, self.q_size :]

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual stream x [n, E] and attended values [n, h·d] -> the layer's output [n, E]."""
        x = self.output(attended).add_(x)
        out: Tensor = self.mlp(self.mlp_norm(x)).add_(x)
        return out


def queries(layer: DecoderLayer, x: Tensor, rope: Rope) -> Tensor:
    """A layer's input [n, E] -> its rotated queries [n, h, d] alone."""
    out: Tensor = layer.qkv.part(layer.input_norm(x), slice(layer.q_size)).unflatten(-1, (-1, layer.head_dim))
    return rotate(out, rope)


def keys_values(layer: DecoderLayer, x: Tensor, rope: Rope) -> Tensor:
    """A layer's input [n, E] -> its rotated keys and its values [n, 2·n_kv·d] alone."""
    kv = layer.qkv.part(layer.input_norm(x), slice(layer.q_size, None))
    heads = kv.unflatten(-1, (-1, layer.head_dim))
    rotated = rotate(heads[:, : layer.num_kv_heads], rope)
    return torch.cat((rotated, heads[:, layer.num_kv_heads :]), dim=1).flatten(1) if torch.compiler.is_compiling() else kv
