"""Training's operator for CPUs that multiply bfloat16 against PyTorch's attention in float32, forth and back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from models.attention import full_attention, masked_attention
from models.causal_attention import causal_attention, suits
from models.tiles import has_tiles

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("operators"),
    pytest.mark.skipif(not has_tiles(), reason="needs a CPU with AVX512-BF16"),
]


def example(batch: int, length: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, and the gradient of what comes out."""
    random = torch.Generator().manual_seed(length + head_dim)
    shapes = ((heads, head_dim), (2, kv_heads, head_dim), (heads, head_dim))
    queries, kv, grad = (torch.randn(batch, length, *shape, generator=random).bfloat16() for shape in shapes)
    return queries * 2, kv, grad


def outcome(attend: Callable[[Tensor, Tensor], Tensor], queries: Tensor, kv: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """What comes out, and the gradients of queries, keys and values."""
    queries, kv = (x.clone().requires_grad_() for x in (queries, kv))
    out = attend(queries, kv)
    out.backward(grad)
    assert queries.grad is not None and kv.grad is not None
    return out.detach(), queries.grad, *kv.grad.unbind(2)


def by_pytorch(queries: Tensor, kv: Tensor) -> Tensor:
    return full_attention(queries, kv[:, :, 0], kv[:, :, 1], None, causal=True).view_as(queries)


@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 128])
@pytest.mark.parametrize(("batch", "heads", "kv_heads"), [(1, 1, 1), (3, 6, 2), (2, 4, 4)])
def test_it_is_as_exact_as_pytorch_is_in_bfloat16(batch: int, heads: int, kv_heads: int, head_dim: int) -> None:
    for length in (2, 31, 32, 33, 150, 300):
        inputs = example(batch, length, heads, kv_heads, head_dim)
        exact = outcome(by_pytorch, *(x.float() for x in inputs))
        for want, theirs, ours in zip(exact, outcome(by_pytorch, *inputs), outcome(causal_attention, *inputs), strict=True):
            assert ours.dtype == torch.bfloat16
            # Few keys' gradients nearly cancel: what is left of them is as inexact in both.
            allowed = max(0.005 * want.norm(), 1.2 * (theirs.float() - want).norm())
            assert (ours.float() - want).norm() <= allowed


def test_one_row_sees_itself_alone() -> None:
    queries, kv, grad = example(2, 1, 4, 2, 48)
    out, of_queries, of_keys, of_values = outcome(causal_attention, queries, kv, grad)
    assert torch.equal(out, kv[:, :, 1].repeat(1, 1, 2, 1))
    # Nothing but what rounding leaves of a difference of equal sums, which CPUs add in different orders.
    assert of_queries.abs().max() < 1e-5 and of_keys.abs().max() < 1e-5
    torch.testing.assert_close(of_values.float(), grad.float().unflatten(2, (2, 2)).sum(2), atol=0.02, rtol=0.01)


def test_what_comes_later_changes_nothing() -> None:
    queries, kv, _ = example(1, 100, 6, 2, 48)
    before = causal_attention(queries, kv)
    kv[:, 70:], queries[:, 70:] = 9, -9
    assert torch.equal(causal_attention(queries, kv)[:, :70], before[:, :70])


def test_the_number_of_threads_changes_nothing() -> None:
    inputs = example(4, 200, 6, 2, 48)
    alone = outcome(causal_attention, *inputs)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert all(torch.equal(one, other) for one, other in zip(outcome(causal_attention, *inputs), alone, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_training_takes_it_under_autocast_only() -> None:
    queries, kv, _ = (x.float() for x in example(2, 40, 6, 2, 48))
    attend = masked_attention(2, 6, 2, None, causal=True)
    rows = queries.flatten(2).flatten(0, 1), kv.flatten(2).flatten(0, 1)
    exact = attend(*rows)
    assert exact.dtype == torch.float32 and not suits(queries)
    with torch.autocast("cpu", torch.bfloat16):
        assert suits(queries)
        assert torch.equal(attend(*rows), causal_attention(queries, kv).flatten(2).flatten(0, 1))


def test_what_does_not_belong_together_is_refused() -> None:
    queries, kv, _ = example(2, 40, 6, 2, 48)
    for wrong in (kv[:, :39], kv[..., :32], kv[:, :, :, :0]):
        with pytest.raises(RuntimeError, match="do not belong together"):
            causal_attention(queries, wrong)
