"""Batches: every conversation once, within the budget, and the same again."""

import numpy as np
import pytest

from training.batches import MULTIPLE, collate, plan_batches
from training.corpus import Corpus

LENGTHS = np.random.default_rng(0).integers(1, 700, 3000)


def test_an_epoch_has_every_conversation_once_within_the_budget():
    plan = plan_batches(LENGTHS, 4096, seed=1, epoch=0)
    assert sorted(np.concatenate(plan).tolist()) == list(range(3000))
    assert all(len(batch) * -(-LENGTHS[batch].max() // MULTIPLE) * MULTIPLE <= 4096 for batch in plan)


def test_batches_waste_little_on_padding():
    plan = plan_batches(LENGTHS, 4096, seed=1, epoch=0)
    padded = sum(len(batch) * LENGTHS[batch].max() for batch in plan)
    assert LENGTHS.sum() / padded > 0.93


def test_the_plan_follows_from_seed_and_epoch():
    def flat(seed: int, epoch: int) -> list[list[int]]:
        return [batch.tolist() for batch in plan_batches(LENGTHS, 4096, seed=seed, epoch=epoch)]

    assert flat(1, 2) == flat(1, 2)
    assert flat(1, 2) != flat(1, 3)
    assert flat(1, 2) != flat(2, 2)


@pytest.mark.parametrize("lengths", [[5000], [5000, 5000, 3], [1]])
def test_what_exceeds_the_budget_stands_alone(lengths: list[int]):
    plan = plan_batches(np.array(lengths), 4096, seed=0, epoch=0)
    assert sorted(np.concatenate(plan).tolist()) == list(range(len(lengths)))
    assert all(len(batch) == 1 for batch in plan if 5000 in [lengths[i] for i in batch])


def test_rows_are_padded_on_the_right_to_a_round_length():
    tokens = np.arange(1, 31, dtype=np.int32)
    corpus = Corpus(tokens, tokens % 2 == 0, np.array([0, 4, 30]), "key")
    batch = collate(corpus, np.array([1, 0]), max_length=20)
    assert batch.token_ids.shape == batch.response.shape == (2, 32)
    assert batch.token_ids[0, :20].tolist() == list(range(5, 25)), "cut at max_length"
    assert batch.token_ids[1].tolist() == [1, 2, 3, 4] + [0] * 28
    assert batch.response[1].nonzero().flatten().tolist() == [1, 3]
