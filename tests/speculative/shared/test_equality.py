"""Two processes against one, in float32: the same tokens, whatever is drafted, kept and used again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from speculative.engine import Engine
from speculative.policy import DraftShape, FixedPolicy
from speculative.prefix_cache import BLOCK_TOKENS, extend_keys
from tests.speculative.conftest import N0, N1, request, run, tokens
from tests.speculative.shared.conftest import LoadEngine
from tests.speculative.test_engine import mixed_requests
from tests.speculative.test_prefixes import turns

pytestmark = pytest.mark.integration

PAIRS = [
    (N0, "moa"),
    (N1, "moa"),
    (N0, "entry and block"),
    (N0, "paired"),
    (N0, "paired block"),
    (N0, "eagle3"),
    (N0, "independent"),
    (N0, "ngram"),
]
SHAPES = (DraftShape(3, 3, 8), DraftShape(3, 2, 5), DraftShape(3, 1, 3))
SAMPLING: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.95}]


@pytest.fixture(scope="module", params=range(len(PAIRS)), ids=lambda kind: " ".join((PAIRS[kind][0].name, PAIRS[kind][1])))
def kind(request: pytest.FixtureRequest) -> int:
    """Which of the pairs is tested."""
    number: int = request.param
    return number


@pytest.fixture(scope="module")
def pair(kind: int, load: LoadEngine) -> Iterator[tuple[Engine, Engine, Engine]]:
    """Of one target: an engine of one process without a drafter, the same with one, and one of two processes with that."""
    folder, drafter = PAIRS[kind]
    shared = load(folder / "target", drafter, 2)
    yield load(folder / "target", "none", 1), load(folder / "target", drafter, 1), shared
    shared.close()


@pytest.mark.parametrize("turn", range(2))
def test_two_processes_write_what_one_writes(pair: tuple[Engine, Engine, Engine], kind: int, turn: int) -> None:
    plain, one, two = pair
    shape = SHAPES[(kind + turn) % len(SHAPES)]
    expected = tokens(run(plain, mixed_requests()))  # greedy, and seeded with all kinds of settings
    outputs = []
    for engine in (one, two):
        engine.policy = FixedPolicy(shape)
        outputs.append(run(engine, mixed_requests()))
        assert tokens(outputs[-1]) == expected
    drafted = [[(s[-1].stats.num_draft_tokens, s[-1].stats.num_accepted_draft_tokens) for s in each.values()] for each in outputs]
    assert drafted[0] == drafted[1]
    assert sum(accepted for _, accepted in drafted[0]) > 0


def test_two_processes_write_the_same_without_speculation(pair: tuple[Engine, Engine, Engine]) -> None:
    plain, _, two = pair
    assert tokens(run(two, mixed_requests(speculative=False))) == tokens(run(plain, mixed_requests()))


def test_a_drafter_remembers_the_same_of_all_heads(pair: tuple[Engine, Engine, Engine]) -> None:
    caches = []
    for engine in pair[1:]:
        engine.resize(3, 256)  # nothing is known of what one of them has read without drafting
        for cache in engine._drafter_caches:
            cache.data.zero_()
        run(engine, [request("a", list(range(3, 60)), max_tokens=30, temperature=0.0)])
        caches.append([cache.data for cache in engine._drafter_caches])
    for one, two in zip(*caches, strict=True):
        assert one.any()
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


def test_beginnings_are_kept_and_used_by_both(pair: tuple[Engine, Engine, Engine], kind: int) -> None:
    _, one, two = pair
    sampling = SAMPLING[kind % 2]
    for engine in (one, two):
        engine.resize(3, 128)
    expected, stats = turns(one, **sampling)
    said, stats_of_two = turns(two, **sampling)
    assert said == expected
    assert [each.cached_tokens for each in stats_of_two] == [each.cached_tokens for each in stats]
    assert stats[-1].cached_tokens > 0


def test_blocks_are_those_of_one_process_and_of_use_to_it(pair: tuple[Engine, Engine, Engine]) -> None:
    _, one, two = pair
    prompt = list(range(40, 96))
    keys: list[bytes] = []
    extend_keys(keys, prompt, "")
    keys = keys[: len(prompt) // BLOCK_TOKENS]
    asked = request("a", prompt, max_tokens=10, temperature=0.0)
    contents = []
    for engine in (one, two):
        engine.resize(3, 256)
        expected = tokens(run(engine, [asked]))
        contents.append(engine.prefixes.read(keys))
    for ours, theirs in zip(contents[0].rows, contents[1].rows, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    for engine, others in ((one, contents[1]), (two, contents[0])):
        engine.resize(3, 256)
        packed = engine.prefixes.format.pack(others)
        engine.prefixes.add(keys, engine.prefixes.format.unpack(packed))
        outputs = run(engine, [asked])
        assert outputs["a"][-1].stats.cached_tokens == len(keys) * BLOCK_TOKENS
        assert tokens(outputs) == expected


def test_both_are_named_alike(pair: tuple[Engine, Engine, Engine]) -> None:
    _, one, two = pair
    assert (two.info.fingerprint, two.info.pair) == (one.info.fingerprint, one.info.pair)
    # Half of the keys and values are elsewhere, and what each process takes is told.
    assert two.info.memory["weights"] < one.info.memory["weights"]
    assert two.cache.nbytes * 2 == one.cache.nbytes
