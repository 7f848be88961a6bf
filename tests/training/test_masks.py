"""Masks, with every matrix written out. Conventions are those of the reference fixtures."""

import pytest
import torch
from torch import Tensor

from training.masks import (
    cross_attention_mask,
    draft_depths,
    draw_intervals,
    draw_staircase,
    last_boundaries,
    proposing_positions,
    self_attention_mask,
    staircase_probability,
    verification_boundaries,
)


def bits(*rows: str) -> Tensor:
    """Rows of 0 and 1 as a boolean matrix."""
    return torch.tensor([[c == "1" for c in row.replace(" ", "")] for row in rows])


PROPOSING = bits("000 1111111 00", "00 111 00 1111 0")
BOUNDARIES = bits("111 0010010 11", "11 001 11 0010 1")


def test_every_position_that_proposes_nothing_and_every_interval_th_after_it_is_a_boundary():
    assert torch.equal(verification_boundaries(PROPOSING, torch.tensor([3, 3])), BOUNDARIES)
    # One interval per sequence, counted anew for each turn.
    assert torch.equal(verification_boundaries(PROPOSING, torch.tensor([6, 2])), bits("111 0000010 11", "11 010 11 0101 1"))


def test_phases_shorten_the_first_interval():
    phased = verification_boundaries(PROPOSING, torch.tensor([3, 3]), torch.tensor([2, 1]))
    assert torch.equal(phased, bits("111 1001001 11", "11 010 11 0100 1"))


def test_the_first_position_is_a_boundary_even_in_a_row_that_is_all_response():
    assert torch.equal(verification_boundaries(bits("11111"), torch.tensor([3])), bits("10010"))


def test_depth_counts_the_drafted_tokens_before_a_proposal():
    assert draft_depths(BOUNDARIES).tolist() == [
        [-1, -1, -1, 0, 1, -1, 0, 1, -1, 0, -1, -1],
        [-1, -1, 0, 1, -1, -1, -1, 0, 1, -1, 0, -1],
    ]
    assert last_boundaries(BOUNDARIES).tolist() == [[0, 1, 2, 2, 2, 5, 5, 5, 8, 8, 10, 11], [0, 1, 1, 1, 4, 5, 6, 6, 6, 9, 9, 11]]


def test_intervals_of_6_to_14_reach_depths_0_to_12():
    response = torch.ones(9, 60, dtype=torch.bool)
    response[:, :4] = False
    depths = draft_depths(verification_boundaries(response, torch.arange(6, 15)))
    assert depths.amax(dim=1).tolist() == list(range(4, 13))


def test_cross_attention_sees_memory_up_to_the_last_boundary():
    assert torch.equal(
        cross_attention_mask(bits("11 001 00"))[0, 0],
        bits(
            "1000000",
            "1100000",
            "1100000",
            "1100000",
            "1111100",
            "1111100",
            "1111100",
        ),
    )


def test_self_attention_is_causal_and_the_staircase_hides_what_precedes_the_last_boundary():
    masks = self_attention_mask(bits("11 001 00", "11 001 00"), torch.tensor([False, True]))
    assert torch.equal(masks[0, 0], torch.ones(7, 7).tril().bool())
    assert torch.equal(
        masks[1, 0],
        bits(
            "1000000",
            "0100000",
            "0110000",
            "0111000",
            "0000100",
            "0000110",
            "0000111",
        ),
    )


def test_no_position_is_left_without_anything_to_see():
    response = torch.rand(8, 40) < 0.7
    boundaries = verification_boundaries(response, torch.arange(6, 14))
    assert cross_attention_mask(boundaries).any(-1).all()
    assert self_attention_mask(boundaries, torch.ones(8, dtype=torch.bool)).any(-1).all()


def test_the_token_before_an_assistants_proposes_it():
    # The prompt's last token does; a response's last token, its end of turn, does not.
    assert torch.equal(proposing_positions(bits("000 1111111 00", "00 111 00 1111 0")), bits("00 1111111 000", "0 111 00 1111 00"))


@pytest.mark.parametrize(
    ("progress", "until", "probability"),
    [(0.0, 0.5, 1.0), (0.125, 0.5, 0.75), (0.5, 0.5, 0.0), (0.9, 0.5, 0.0), (0.0, 0.0, 0.0), (0.5, 1.0, 0.5)],
)
def test_the_staircase_fades_linearly(progress: float, until: float, probability: float):
    assert staircase_probability(progress, until) == probability


def test_draws_cover_their_range_and_repeat_with_the_seed():
    intervals = draw_intervals(1000, 6, 14, torch.Generator().manual_seed(3))
    assert sorted(set(intervals.tolist())) == list(range(6, 15))
    assert torch.equal(intervals, draw_intervals(1000, 6, 14, torch.Generator().manual_seed(3)))
    assert draw_staircase(1000, 0.0, torch.Generator()).sum() == 0
    assert draw_staircase(1000, 1.0, torch.Generator()).all()
