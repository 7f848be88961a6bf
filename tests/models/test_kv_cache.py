"""The cache as plain storage: rows, slots, moves and LSA's layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from models.kv_cache import KVCache, KVWindow, lsa_layout

LAYERS, SLOTS, SCRATCH, LENGTH, KV_HEADS, HEAD_DIM = 2, 3, 4, 6, 2, 3
WIDTH = 2 * KV_HEADS * HEAD_DIM


@pytest.fixture
def cache() -> KVCache:
    return KVCache(LAYERS, SLOTS, SCRATCH, LENGTH, KV_HEADS, HEAD_DIM, dtype=torch.float32)


def marked(*marks: float) -> Tensor:
    """One row for each mark, filled with it."""
    return torch.tensor(marks, dtype=torch.float32).unsqueeze(1).expand(-1, WIDTH).contiguous()


def marks(cache: KVCache, layer: int, slot: int) -> list[float]:
    """The first key component of every row of a slot: its scratch rows, then its tokens."""
    keys, _ = cache.read(layer, slot, 1, SCRATCH + LENGTH)
    return keys[0, 0, :, 0].tolist()


def rows(cache: KVCache, slot: int, *positions: int) -> Tensor:
    return torch.tensor([cache.flat_row(slot, position) for position in positions])


Move = Callable[[KVCache, Tensor, Tensor], None]


def by_tensors(cache: KVCache, source: Tensor, destination: Tensor) -> None:
    cache.move_rows(source, destination)


def by_lists(cache: KVCache, source: Tensor, destination: Tensor) -> None:
    cache.move_listed_rows(source.tolist(), destination.tolist())


MOVES = [by_tensors, by_lists]


def test_slots_hold_their_scratch_rows_first(cache: KVCache) -> None:
    assert cache.flat_row(0, -SCRATCH) == 0
    assert cache.flat_row(0, 0) == 4
    assert cache.flat_row(1, -SCRATCH) == 10
    assert cache.flat_row(2, LENGTH - 1) == 29


def test_a_new_cache_holds_finite_rows(cache: KVCache) -> None:
    assert cache.data.isfinite().all()


def test_written_rows_are_read_back_in_their_slot_and_layer_only(cache: KVCache) -> None:
    cache.write(1, rows(cache, 1, 0, 1, -SCRATCH), marked(1, 2, 3))
    assert marks(cache, layer=1, slot=1) == [3, 0, 0, 0, 1, 2, 0, 0, 0, 0]
    assert marks(cache, layer=0, slot=1) == [0] * 10
    assert marks(cache, layer=1, slot=0) == [0] * 10
    assert marks(cache, layer=1, slot=2) == [0] * 10


def test_a_row_holds_all_keys_then_all_values(cache: KVCache) -> None:
    cache.write(0, rows(cache, 2, 3), torch.arange(WIDTH, dtype=torch.float32).unsqueeze(0))
    keys, values = cache.read(0, first_slot=2, batch=1, span=SCRATCH + 4)
    assert keys[0, :, -1].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert values[0, :, -1].tolist() == [[6, 7, 8], [9, 10, 11]]


def test_reading_covers_consecutive_slots(cache: KVCache) -> None:
    cache.write(0, torch.cat((rows(cache, 1, 0), rows(cache, 2, 1))), marked(5, 6))
    keys, values = cache.read(0, first_slot=1, batch=2, span=SCRATCH + 2)
    assert keys.shape == values.shape == (2, KV_HEADS, SCRATCH + 2, HEAD_DIM)
    assert keys[:, 0, SCRATCH:, 0].tolist() == [[5, 0], [0, 6]]


def test_earlier_reads_show_later_writes(cache: KVCache) -> None:
    before, _ = cache.read(0, 0, 1, SCRATCH + LENGTH)
    cache.write(0, rows(cache, 0, 2), marked(9))
    assert before[0, 0, SCRATCH + 2, 0] == 9


def test_views_stay_right_after_many_different_spans(cache: KVCache) -> None:
    cache.write(0, rows(cache, 1, 0), marked(4))
    for slot in range(SLOTS):
        for span in range(1, SCRATCH + LENGTH + 1):
            for batch in range(1, SLOTS - slot + 1):
                keys, _ = cache.read(0, slot, batch, span)
                expected = 4 if slot <= 1 < slot + batch and span > SCRATCH else 0
                assert keys.max() == expected, (slot, batch, span)


@pytest.mark.parametrize("move", MOVES)
def test_an_accepted_path_moves_from_scratch_behind_the_tokens_in_every_layer(cache: KVCache, move: Move) -> None:
    for layer in range(LAYERS):
        cache.write(layer, rows(cache, 1, 0, 1, -4, -3, -2, -1), marked(10, 11, 20, 21, 22, 23))
    # Two tokens are verified; of the tree's nodes 0…3 the path 0, 2, 3 is accepted.
    move(cache, rows(cache, 1, -4, -2, -1), rows(cache, 1, 2, 3, 4))
    for layer in range(LAYERS):
        assert marks(cache, layer, slot=1)[SCRATCH:] == [10, 11, 20, 22, 23, 0]


@pytest.mark.parametrize("move", MOVES)
def test_rows_of_several_slots_move_at_once(cache: KVCache, move: Move) -> None:
    cache.write(0, torch.cat((rows(cache, 0, -4, -3), rows(cache, 2, -4))), marked(1, 2, 3))
    move(cache, torch.cat((rows(cache, 0, -3), rows(cache, 2, -4))), torch.cat((rows(cache, 0, 5), rows(cache, 2, 0))))
    assert marks(cache, 0, slot=0)[SCRATCH:] == [0, 0, 0, 0, 0, 2]
    assert marks(cache, 0, slot=2)[SCRATCH:] == [3, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("move", MOVES)
def test_rows_that_change_places_do_not_overwrite_one_another(cache: KVCache, move: Move) -> None:
    cache.write(0, rows(cache, 0, 0, 1, 2), marked(1, 2, 3))
    move(cache, rows(cache, 0, 1, 2, 0), rows(cache, 0, 0, 1, 2))
    assert marks(cache, 0, slot=0)[SCRATCH:] == [2, 3, 1, 0, 0, 0]


def test_listed_rows_move_in_what_a_cache_of_another_size_has() -> None:
    half = KVCache(LAYERS, SLOTS, SCRATCH, LENGTH, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    half.resize(2)
    half.write(1, rows(half, 1, -2), marked(2.5).bfloat16())
    half.move_listed_rows(rows(half, 1, -2).tolist(), rows(half, 0, 4).tolist())
    assert marks(half, 1, slot=0)[SCRATCH:] == [0, 0, 0, 0, 2.5, 0] and not half.data[0].any()


def test_a_slot_moves_with_its_first_tokens_and_leaves_the_rest(cache: KVCache) -> None:
    for layer in range(LAYERS):
        cache.write(layer, rows(cache, 0, 0, 1, 2, -4), marked(1, 2, 3, 99))
        cache.write(layer, rows(cache, 2, 2), marked(7))
    cache.move_slot(0, 2, length=2)
    for layer in range(LAYERS):
        assert marks(cache, layer, slot=2) == [0, 0, 0, 0, 1, 2, 7, 0, 0, 0]
        assert marks(cache, layer, slot=0) == [99, 0, 0, 0, 1, 2, 3, 0, 0, 0]


def test_lsa_reads_key_and_value_of_each_head_side_by_side() -> None:
    row = torch.tensor([10.0, 11, 20, 21, 110, 111, 120, 121])  # keys of heads 1 and 2, then their values
    assert lsa_layout(row, num_kv_heads=2, head_dim=2).tolist() == [10, 11, 110, 111, 20, 21, 120, 121]


def test_gathered_rows_hold_all_layers_of_each_token(cache: KVCache) -> None:
    cache.write(0, rows(cache, 1, 0, 1), marked(1, 2))
    cache.write(1, rows(cache, 1, 0, 1), marked(3, 4))
    gathered = cache.gather(rows(cache, 1, 1, 0))
    assert gathered.shape == (2, LAYERS, WIDTH)
    assert gathered[:, :, 0].tolist() == [[2, 4], [1, 3]]


def test_its_size_in_bytes_counts_every_row() -> None:
    cache = KVCache(2, 3, 4, 6, 2, 3, dtype=torch.bfloat16)
    assert cache.nbytes == 2 * 30 * 12 * 2


def test_a_window_is_the_slots_it_covers(cache: KVCache) -> None:
    cache.data.normal_()
    window = KVWindow(cache.window(1, 2), KV_HEADS, HEAD_DIM)
    for layer in range(LAYERS):
        for ours, theirs in zip(window.read(layer, 0, 2, 7), cache.read(layer, 1, 2, 7), strict=True):
            assert torch.equal(ours, theirs)
    places = torch.tensor([4, 9, 11])
    assert torch.equal(window.gather(places), cache.gather(places + cache.rows_per_slot))


def test_writing_to_a_window_writes_to_the_cache(cache: KVCache) -> None:
    window = KVWindow(cache.window(1, 2), KV_HEADS, HEAD_DIM)
    window.write(1, torch.tensor([0, cache.rows_per_slot + SCRATCH]), marked(1, 2))
    assert marks(cache, layer=1, slot=1) == [1, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    assert marks(cache, layer=1, slot=2) == [0, 0, 0, 0, 2, 0, 0, 0, 0, 0]
    assert marks(cache, layer=0, slot=1) == [0] * 10
