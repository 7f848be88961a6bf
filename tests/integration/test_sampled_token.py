"""The operator that chooses sampled tokens, against ``sampling.choose`` without it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models import sampled_token
from speculative.request import SamplingParams
from speculative.sampling import choose

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("operators"),
]

SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 1.5},
    {"temperature": 0.05},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 700, "top_p": 0.95},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
]


def both(row: Tensor, params: SamplingParams, position: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """What the operator chooses, and PyTorch."""
    assert sampled_token.suits(row)
    ours = choose(row, params, 5, position)
    with monkeypatch.context() as without:
        without.setattr(sampled_token, "suits", lambda logits: False)
        return ours, choose(row, params, 5, position)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("vocabulary", [32, 8192])
def test_it_chooses_what_pytorch_does(settings: dict[str, float], vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    params = SamplingParams(**settings)  # type: ignore[arg-type]
    rows = torch.randn(150, vocabulary, generator=generator) * torch.rand(150, 1, generator=generator) * 8
    chosen = [both(row, params, position, monkeypatch) for position, row in enumerate(rows)]
    # Sums and exponentials are rounded in other ways, so that a token at the very edge of what is allowed may be in or out.
    assert sum(ours != theirs for ours, theirs in chosen) <= 1
    assert len({ours for ours, _ in chosen}) > 20 or vocabulary == 32


@pytest.mark.parametrize("settings", SETTINGS)
def test_what_is_not_allowed_is_not_chosen(settings: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(**settings)  # type: ignore[arg-type]
    row = torch.randn(4096, generator=torch.Generator().manual_seed(3)) * 3
    allowed = [7, 4090, 2000]
    hidden = torch.full_like(row, float("-inf")).index_copy(0, torch.tensor(allowed), row[allowed])
    chosen = [both(hidden, params, position, monkeypatch) for position in range(60)]
    assert all(ours == theirs and ours in allowed for ours, theirs in chosen)
    only = torch.full_like(row, float("-inf")).index_fill(0, torch.tensor([4095]), -3.0)
    assert choose(only, params, 5, 0) == 4095


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_logits_that_are_no_numbers_still_give_a_token(settings: dict[str, float], value: float) -> None:
    assert 0 <= choose(torch.full((64,), value), SamplingParams(**settings), 5, 0) < 64  # type: ignore[arg-type]


def test_a_row_within_others_is_read_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(3, 4, 1024, generator=torch.Generator().manual_seed(9))
    params = SamplingParams(temperature=1.0)
    for position, row in enumerate((logits[1, 2], logits[:, 1].t().contiguous().t()[2])):
        ours, theirs = both(row, params, position, monkeypatch)
        assert ours == theirs


@pytest.mark.parametrize("row", [torch.zeros(40), torch.zeros(32, dtype=torch.bfloat16)])
def test_other_rows_are_left_to_pytorch(row: Tensor) -> None:
    assert not sampled_token.suits(row)
    assert 0 <= choose(row, SamplingParams(temperature=1.0), 5, 0) < len(row)
