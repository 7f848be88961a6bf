"""Rare tokens: what of a text the draft vocabulary lacks."""

from __future__ import annotations

import pytest
import torch

from speculative.drafters.rare import MOST_RARE, NONE, RareTokens, in_one_tensor
from speculative.request import Request, SamplingParams
from speculative.sequence import Sequence
from speculative.texts import Texts

TEXTS = Texts(None, 1000, frozenset())
FREQUENT = torch.arange(500)


def sequence(tokens: list[int], name: str = "a") -> Sequence:
    return TEXTS.begin(Request(name, tuple(tokens), SamplingParams(50, temperature=0.0)), 1000)


def listed(rare: RareTokens, *sequences: Sequence) -> list[list[int]]:
    told = rare.of(sequences)
    ids, padded = in_one_tensor(told), in_one_tensor(told, MOST_RARE)
    assert [[token for token in row if token != NONE] for row in ids.tolist()] == told
    assert ids.shape == (len(sequences), max(map(len, told)))
    assert padded.shape == (len(sequences), MOST_RARE) and torch.equal(padded[:, : ids.shape[1]], ids)
    assert (padded[:, ids.shape[1] :] == NONE).all()
    return told


def test_each_text_has_its_own_and_what_it_says_joins_them() -> None:
    rare = RareTokens(FREQUENT)
    first, second, third = sequence([1, 700, 2, 600, 700]), sequence([3, 4], "b"), sequence([900], "c")
    assert listed(rare, first, second, third) == [[600, 700], [], [900]]
    first.tokens += [5, 600, 800]
    second.tokens += [501]
    assert listed(rare, first, second) == [[700, 600, 800], [501]]
    assert listed(rare, first) == [[700, 600, 800]]  # nothing new


def test_the_newest_are_kept() -> None:
    rare = RareTokens(FREQUENT)
    text = sequence([token for many in (range(600, 680), [1] * 9) for token in many])
    assert listed(rare, text) == [list(range(680 - MOST_RARE, 680))]
    text.tokens += [700, 650]
    newest = [*range(681 - MOST_RARE, 650), *range(651, 680), 700, 650]
    assert listed(rare, text) == [newest]
    assert listed(RareTokens(FREQUENT), text) == [newest]  # read at once, it is the same


@pytest.mark.parametrize("after", [[700], [700, 2, 650], [700, 2, 650, 3]], ids=["shorter", "as long", "longer"])
def test_a_text_that_an_edge_takes_back_is_read_anew(after: list[int]) -> None:
    rare = RareTokens(FREQUENT)
    text = sequence([700, 2, 600])
    assert listed(rare, text) == [[700, 600]]
    text.tokens = list(after)
    assert listed(rare, text) == [[700, 650][: len(after)]]
    del text.tokens[1:]
    assert listed(rare, text) == [[700]]


def test_a_text_that_has_ended_is_forgotten() -> None:
    rare = RareTokens(FREQUENT)
    assert listed(rare, sequence([700])) == [[700]]
    rare.forget(sequence([]))
    assert listed(rare, sequence([1, 600])) == [[600]]
    rare.forget(sequence([], "never begun"))
