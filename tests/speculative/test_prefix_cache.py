"""Which beginnings of texts are kept."""

from __future__ import annotations

import random

import pytest

from speculative.prefix_cache import PrefixCache, extend_keys

SIZE = 4


def keys(tokens: list[int], salt: str = "") -> list[bytes]:
    found: list[bytes] = []
    extend_keys(found, tokens, salt, SIZE)
    return found


def keep(cache: PrefixCache, tokens: list[int]) -> list[tuple[int, int]]:
    return cache.insert(keys(tokens), [True] * len(keys(tokens)))


def known(cache: PrefixCache, tokens: list[int]) -> int:
    return len(cache.match(keys(tokens))) * SIZE


def test_keys_name_whole_beginnings_of_whole_blocks() -> None:
    text = list(range(11))
    assert len(keys(text)) == 2
    assert keys(text)[:1] == keys(text[:4])
    assert keys([*range(4), 9, 9, 9, 9])[0] == keys(text)[0] and keys([*range(4), 9, 9, 9, 9])[1] != keys(text)[1]
    assert keys([9, *range(1, 11)])[1] != keys(text)[1]  # equal tokens behind other ones
    assert not set(keys(text)) & set(keys(text, "salt"))


def test_keys_are_the_same_however_the_text_grew() -> None:
    grown: list[bytes] = []
    for end in range(0, 30, 3):
        extend_keys(grown, list(range(end)), "s", SIZE)
    assert grown == keys(list(range(27)), "s")


def test_texts_that_begin_alike_share_blocks() -> None:
    cache = PrefixCache(8)
    assert [place for place, _ in keep(cache, [1] * 8 + [2] * 4)] == [0, 1, 2]
    assert [place for place, _ in keep(cache, [1] * 8 + [3] * 4)] == [2]
    assert len(cache) == 4
    assert known(cache, [1] * 8 + [2] * 9) == 12
    assert known(cache, [1] * 5) == 4
    assert known(cache, [2] * 12) == 0


def test_the_least_recently_used_text_gives_way_from_its_end() -> None:
    cache = PrefixCache(4)
    first, second = list(range(8)), list(range(100, 108))
    keep(cache, first)
    keep(cache, second)
    assert known(cache, first) == 8  # it is used, and so outlives the other
    keep(cache, [7] * 4)
    assert (known(cache, first), known(cache, second)) == (8, 4)
    cache.check_integrity()


def test_a_text_longer_than_everything_keeps_its_beginning() -> None:
    cache = PrefixCache(3)
    keep(cache, [5] * 8)
    assert [place for place, _ in keep(cache, list(range(40)))] == [0, 1, 2]
    assert known(cache, list(range(40))) == 12
    cache.check_integrity()


def test_nothing_is_kept_without_blocks() -> None:
    cache = PrefixCache(0)
    assert keep(cache, [1] * 8) == [] and known(cache, [1] * 8) == 0


def test_a_block_without_the_drafters_rows_is_written_again_with_them() -> None:
    cache = PrefixCache(4)
    text = keys([1] * 8)
    written = cache.insert(text, [False, True])
    assert [block.drafted for block in cache.match(text)] == [False, True]
    assert cache.insert(text, [False, False]) == []
    assert cache.insert(text, [True, True]) == written[:1]
    assert [block.drafted for block in cache.match(text)] == [True, True]


@pytest.mark.parametrize("seed", range(10))
def test_random_histories_find_what_was_written_or_nothing(seed: int) -> None:
    rng = random.Random(seed)
    cache = PrefixCache(rng.choice([1, 7, 20]))
    stored: dict[int, bytes] = {}  # what the storage would hold
    for _ in range(300):
        text = [rng.randint(0, 1) for _ in range(rng.randint(0, 40))]
        names = keys(text)
        if rng.random() < 0.5:
            for place, number in cache.insert(names, [True] * len(names)):
                stored[number] = names[place]
        else:
            for name, block in zip(names, cache.match(names), strict=False):
                assert stored[block.number] == name
        cache.check_integrity()
