import pytest
import torch

from speculative.drafters.ngram import NgramIndex
from speculative.sampling import argmax, top_tokens


@pytest.mark.parametrize("k", [1, 4, 32])
@pytest.mark.parametrize("vocabulary", [160, 8192, 1000])
def test_top_tokens_are_those_of_topk(k: int, vocabulary: int) -> None:
    logits = torch.randn(2, 3, vocabulary, generator=torch.Generator().manual_seed(k))
    values, ids = top_tokens(logits, k)
    expected = logits.topk(k)
    assert torch.equal(values, expected.values)
    assert torch.equal(ids, expected.indices)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [160, 8192])
def test_argmax_is_the_first_of_the_largest(vocabulary: int, dtype: torch.dtype) -> None:
    logits = torch.randint(0, 40, (3, 5, vocabulary), generator=torch.Generator().manual_seed(0)).to(dtype)
    first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(argmax(logits), first)


def test_ngram_continues_the_most_recent_match() -> None:
    assert NgramIndex((4, 3, 2)).continuation([1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 3) == [4, 8, 1]


def test_ngram_prefers_the_longest_match() -> None:
    assert NgramIndex((3, 2)).continuation([7, 1, 2, 5, 0, 1, 2, 6, 7, 1, 2], 1) == [5]


def test_ngram_without_a_match_proposes_nothing() -> None:
    assert NgramIndex((4, 3, 2)).continuation([1, 2, 3, 4], 3) == []


def test_ngram_index_grows_with_the_text() -> None:
    index = NgramIndex((4, 3, 2))
    text = [1, 2, 3]
    assert index.continuation(text, 2) == []
    text += [1, 2]
    assert index.continuation(text, 2) == [3, 1]
    text += [8, 1, 2]
    assert index.continuation(text, 2) == [8, 1]
