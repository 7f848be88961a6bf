"""Memory arrives as it was sent, up to what its format says, and nothing else is taken for memory."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from models.config import MoAConfig
from models.loader import BUNDLED, load_drafter, load_target
from speculative.config import MEMORY_FORMATS, MemoryFormat
from speculative.errors import EngineError, InvalidMemoryError
from speculative.remote.memory_codec import MemoryCodec, RowCodec
from tests.speculative.conftest import N0

LEVELS = {"int8": 127, "int4": 7}
FINITE = st.floats(-1e4, 1e4, width=32)


@st.composite
def rows(draw: st.DrawFn, numbers: st.SearchStrategy[float] = FINITE) -> tuple[int, int, Tensor]:
    groups, size, count = draw(st.integers(1, 5)), draw(st.integers(1, 7)), draw(st.integers(0, 4))
    flat = draw(st.lists(numbers, min_size=count * groups * size, max_size=count * groups * size))
    return groups, size, torch.tensor(flat, dtype=torch.float32).view(count, groups * size)


@given(rows(), st.sampled_from(MEMORY_FORMATS))
def test_what_arrives_is_as_close_as_the_format_allows(sent: tuple[int, int, Tensor], format: MemoryFormat) -> None:
    groups, size, numbers = sent
    codec = RowCodec(format, groups, size)
    data = codec.encode(numbers)
    assert len(data) == len(numbers) * codec.bytes_per_token
    arrived = codec.decode(data)
    assert arrived.shape == numbers.shape and arrived.dtype == torch.float32
    if format == "bfloat16":
        assert torch.equal(arrived, numbers.bfloat16().float())
        return
    each, largest = (arrived - numbers).view(-1, groups, size), numbers.view(-1, groups, size).abs().amax(-1, keepdim=True)
    # Half a step, what the scale's own rounding costs the largest number, and where float16 ends.
    allowed = largest * (0.5 / LEVELS[format] + 2**-10) + LEVELS[format] * 2.0**-24
    assert bool((each.abs() <= allowed).all())


@given(rows(), st.sampled_from(MEMORY_FORMATS))
def test_sending_on_what_arrived_changes_little_more(sent: tuple[int, int, Tensor], format: MemoryFormat) -> None:
    groups, size, numbers = sent
    codec = RowCodec(format, groups, size)
    once = codec.decode(codec.encode(numbers))
    assert bool(torch.isclose(codec.decode(codec.encode(once)), once, rtol=2**-10, atol=1e-4).all())


@given(rows(st.floats(width=32)), st.sampled_from(MEMORY_FORMATS))
def test_any_numbers_arrive_finite(sent: tuple[int, int, Tensor], format: MemoryFormat) -> None:
    groups, size, numbers = sent
    codec = RowCodec(format, groups, size)
    assert bool(codec.decode(codec.encode(numbers)).isfinite().all())


@pytest.mark.parametrize("format", MEMORY_FORMATS)
def test_a_number_that_is_none_costs_its_neighbours_nothing(format: MemoryFormat) -> None:
    codec = RowCodec(format, 2, 3)
    clean = torch.tensor([[1.0, -2.0, 0.0, 0.5, 0.25, 0.125]])
    broken = torch.tensor([[1.0, -2.0, float("nan"), 0.5, float("inf"), float("-inf")]])
    arrived = codec.decode(codec.encode(broken))
    assert torch.equal(arrived[:, :3], codec.decode(codec.encode(clean))[:, :3])
    assert torch.allclose(arrived[0, 3:], torch.tensor([0.5, 0.5, -0.5]), rtol=1e-3)


@pytest.mark.parametrize("format", LEVELS)
def test_numbers_beyond_the_largest_scale_saturate(format: MemoryFormat) -> None:
    most = 65504.0 * LEVELS[format]
    assert RowCodec(format, 1, 2).decode(RowCodec(format, 1, 2).encode(torch.tensor([[3e38, -3e38]]))).tolist() == [[most, -most]]


def test_bytes_are_laid_out_as_documented() -> None:
    numbers = torch.tensor([[127.0, -1.0, 3.0, 14.0, -14.0, 2.0]])
    assert RowCodec("int8", 2, 3).encode(numbers) == struct.pack("<ee6b", 1.0, 14 / 127, 127, -1, 3, 127, -127, 18)
    numbers = torch.tensor([[7.0, -1.0, 3.0, 14.0, -14.0, 2.0]])
    assert RowCodec("int4", 2, 3).encode(numbers) == struct.pack("<ee3B", 1.0, 2.0, 0xF7, 0x73, 0x19)
    assert RowCodec("int4", 1, 1).encode(torch.tensor([[-7.0]])) == struct.pack("<eB", 1.0, 0x09)
    assert RowCodec("bfloat16", 1, 2).encode(torch.tensor([[1.0, -2.0]])) == b"\x80\x3f\x00\xc0"


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_and_strides_are_sent_as_well(kind: torch.dtype) -> None:
    codec = RowCodec("int8", 2, 4)
    numbers = torch.arange(-12.0, 12.0).view(8, 3).to(kind).t()
    assert codec.encode(numbers) == codec.encode(numbers.float().contiguous())


@given(st.binary(max_size=200), st.sampled_from(MEMORY_FORMATS), st.integers(1, 3), st.integers(1, 5))
def test_any_bytes_are_finite_numbers_or_refused(data: bytes, format: MemoryFormat, groups: int, size: int) -> None:
    codec = RowCodec(format, groups, size)
    try:
        arrived = codec.decode(data)
    except InvalidMemoryError:
        return
    assert bool(arrived.isfinite().all()) and arrived.shape == (len(data) // codec.bytes_per_token, codec.numbers)


@pytest.mark.parametrize(
    ("codec", "data", "message"),
    [
        (RowCodec("int8", 1, 2), b"123", "no whole rows"),
        (RowCodec("int8", 1, 2), struct.pack("<ebb", float("nan"), 1, 1), "a scale that is negative or not finite"),
        (RowCodec("int8", 1, 2), struct.pack("<ebb", -1.0, 1, 1), "a scale that is negative or not finite"),
        (RowCodec("int8", 1, 2), struct.pack("<ebb", 1.0, -128, 1), "a number below -127"),
        (RowCodec("int4", 1, 2), struct.pack("<eB", 1.0, 0x81), "a number below -7"),
        (RowCodec("int4", 1, 1), struct.pack("<eB", 1.0, 0x11), "unused half"),
        (RowCodec("bfloat16", 1, 1), b"\xc0\x7f", "not finite"),
    ],
)
def test_garbage_is_refused(codec: RowCodec, data: bytes, message: str) -> None:
    with pytest.raises(InvalidMemoryError, match=message) as caught:
        codec.decode(data)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, EngineError)


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(InvalidMemoryError, match=r"rows of 6 numbers, got a tensor of shape \[2, 5\]"):
        RowCodec("int8", 2, 3).encode(torch.zeros(2, 5))
    with pytest.raises(InvalidMemoryError, match="one of int8, int4, bfloat16"):
        RowCodec("int16", 2, 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidMemoryError, match="at least one number"):
        RowCodec("int8", 0, 3)


def test_nothing_is_no_bytes() -> None:
    codec = RowCodec("int4", 2, 3)
    assert codec.encode(torch.empty(0, 6)) == b"" and codec.decode(b"").shape == (0, 6)


def config_of_bundled_drafter() -> MoAConfig:
    target, _ = load_target(BUNDLED["target"], dtype=torch.float32)
    return load_drafter(BUNDLED["drafter"], target.config, dtype=torch.float32).config


@pytest.mark.integration
@pytest.mark.parametrize(("format", "size"), [("int8", 200), ("int4", 104), ("bfloat16", 384)])
def test_the_bundled_pair_sends_what_the_page_says(format: MemoryFormat, size: int) -> None:
    codec = MemoryCodec.of(config_of_bundled_drafter(), format)
    assert codec.bytes_per_token == size <= 700


def test_a_kib_a_token_for_llama_3_8b() -> None:
    target, _ = load_target(N0 / "target", dtype=torch.float32)
    llama = replace(target.config, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128)
    drafter = MoAConfig.from_target(llama)
    assert [MemoryCodec.of(drafter, format).bytes_per_token for format in MEMORY_FORMATS] == [1040, 528, 2048]
    assert MemoryCodec.of(drafter, "int8").newest_bytes == 0
    with_entry = MemoryCodec.of(replace(drafter, has_entry=True), "int8")
    assert with_entry.newest is not None and with_entry.newest.numbers == 4096
    assert with_entry.newest_bytes == 4096 + 2 * 32


def test_rows_are_those_of_the_drafters_cache() -> None:
    """Keys of all heads, then values: a head with numbers a thousand times larger does not coarsen the others."""
    codec = RowCodec("int8", 4, 48)
    numbers = torch.randn(16, 192, generator=torch.Generator().manual_seed(0))
    numbers[:, 48:96] *= 1000
    error = (codec.decode(codec.encode(numbers)) - numbers).abs().view(16, 4, 48).amax((0, 2))
    assert error[[0, 2, 3]].max() < 0.02 and np.isclose(error[1], 1000 * error[0], rtol=0.9)
