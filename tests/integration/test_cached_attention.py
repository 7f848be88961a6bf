"""The operator, in bfloat16 and float32, against PyTorch's attention in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.cached_attention import cached_attention
from models.tiles import TYPES

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("operators"),
]

KV_HEADS = 2
OFF = {torch.bfloat16: {"atol": 0.02, "rtol": 0.01}, torch.float32: {"atol": 2e-5, "rtol": 1e-5}}
"""How far it may be off."""

both_types = pytest.mark.parametrize("dtype", TYPES, ids=list(TYPES.values()))


def expected(queries: Tensor, kv: Tensor, mask: Tensor) -> Tensor:
    batch, _, rows, span = mask.shape
    head_dim = kv.shape[2] // (2 * KV_HEADS)
    lined_up = queries.float().view(batch, rows, KV_HEADS, head_dim).transpose(1, 2)
    keys, values = kv[:, :span].float().unflatten(2, (2, KV_HEADS, head_dim)).unbind(2)
    out = F.scaled_dot_product_attention(lined_up, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask.float())
    return out.transpose(1, 2).reshape_as(queries)


def example(batch: int, rows: int, span: int, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, a cache in a larger one, and a mask as trees make it; nothing but NaN where nothing may be read."""
    random = torch.Generator().manual_seed(batch * 1000 + rows + span + head_dim)
    queries = torch.randn(batch * rows, KV_HEADS * head_dim, generator=random).mul_(2).to(dtype)
    slots = torch.full((batch + 2, span + 5, 2 * KV_HEADS * head_dim), float("nan"), dtype=dtype)
    kv = slots[1:-1]
    kv[:, :span] = torch.randn(batch, span, kv.shape[2], generator=random)
    scratch = min(12, span)
    seen = torch.zeros(batch, 1, rows, span, dtype=torch.bool)
    seen[..., :scratch] = torch.rand(batch, 1, rows, scratch, generator=random) < 0.4
    ends = torch.randint(scratch, span + 1, (batch, 1, 1, 1), generator=random)
    seen[..., scratch:] = torch.arange(scratch, span) < ends
    seen[:, 0, :, 0] = True
    return queries, kv, torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))


def check(queries: Tensor, kv: Tensor, mask: Tensor) -> None:
    out = cached_attention(queries, kv, mask, KV_HEADS)
    assert out.dtype == queries.dtype
    torch.testing.assert_close(out.float(), expected(queries, kv, mask), **OFF[queries.dtype])


@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (1, 4), (3, 5), (2, 16), (8, 30), (1, 33), (1, 200)])
@both_types
def test_it_gives_what_pytorch_gives(batch: int, rows: int, head_dim: int, dtype: torch.dtype) -> None:
    for span in (9, 32, 76, 141, 464):
        check(*example(batch, rows, span, head_dim, dtype))


@pytest.mark.parametrize("rows", [5, 30, 200])
@both_types
def test_stretches_in_the_midst_may_be_hidden_from_some_rows_or_all(rows: int, dtype: torch.dtype) -> None:
    queries, kv, mask = example(2, rows, 464, 48, dtype)
    stretches = torch.rand(2, 1, -(-rows // 32), 15, generator=torch.Generator().manual_seed(rows)) < 0.5
    stretches[..., 0] = False
    stretches[0, ..., 5] = True
    hidden = stretches.repeat_interleave(32, dim=2)[:, :, :rows].repeat_interleave(32, dim=3)[..., :464]
    check(queries, kv, mask.masked_fill(hidden, float("-inf")))


@pytest.mark.parametrize(("batch", "rows"), [(8, 30), (1, 3), (2, 300)])
@both_types
def test_the_number_of_threads_changes_nothing(batch: int, rows: int, dtype: torch.dtype) -> None:
    inputs = example(batch, rows, 700, 48, dtype)
    alone = cached_attention(*inputs, KV_HEADS)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(cached_attention(*inputs, KV_HEADS), alone)
    finally:
        torch.set_num_threads(threads)


@both_types
def test_masks_may_have_any_values(dtype: torch.dtype) -> None:
    queries, kv, mask = example(2, 30, 300, 48, dtype)
    check(queries, kv, mask + torch.randn(mask.shape[-1]).mul_(3).to(dtype))


@both_types
def test_a_row_that_sees_nothing_gets_zeros(dtype: torch.dtype) -> None:
    queries, kv, mask = example(2, 20, 300, 48, dtype)
    mask[0, 0, 3], mask[1] = float("-inf"), float("-inf")
    out = cached_attention(queries, kv, mask, KV_HEADS).view(2, 20, -1)
    assert not out[0, 3].any() and not out[1].any()
    assert out[0, 2].any() and not out.isnan().any()


@both_types
def test_what_a_text_does_not_see_may_be_anything(dtype: torch.dtype) -> None:
    queries, kv, mask = example(1, 30, 464, 48, dtype)
    mask[..., 64:] = float("-inf")
    known = cached_attention(queries, kv, mask, KV_HEADS)
    kv[:, 64:464] = float("nan")
    assert torch.equal(cached_attention(queries, kv, mask, KV_HEADS), known)


@both_types
def test_large_scores_do_not_overflow(dtype: torch.dtype) -> None:
    queries, kv, mask = example(1, 30, 464, 64, dtype)
    check(queries * 40, kv, mask)


@pytest.mark.parametrize("change", ["odd heads", "strided", "float64"])
def test_what_does_not_fit_is_left_to_pytorch(change: str) -> None:
    queries, kv, mask = example(2, 5, 40, 24 if change == "odd heads" else 48)
    if change == "strided":
        kv = kv.transpose(1, 2).contiguous().transpose(1, 2)
    if change == "float64":
        queries, kv, mask = queries.double(), kv.double(), mask.double()
        torch.testing.assert_close(cached_attention(queries, kv, mask, KV_HEADS).float(), expected(queries, kv, mask))
        return
    check(queries, kv, mask)


def test_inputs_that_do_not_belong_together_are_refused() -> None:
    queries, kv, mask = example(2, 5, 40, 48)
    with pytest.raises(RuntimeError, match="do not belong together"):
        cached_attention(queries[1:], kv, mask, KV_HEADS)
