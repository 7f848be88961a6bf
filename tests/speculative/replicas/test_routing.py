"""Where requests go: to who knows their beginning, and else to who has least to do."""

from __future__ import annotations

import pytest

from speculative.config import ModelInfo
from speculative.prefix_cache import extend_keys
from speculative.replicas.affinity import MOST_HOLDERS, Affinity
from speculative.replicas.loads import Loads
from speculative.replicas.messages import Wish
from speculative.replicas.routing import rank


def keys_of(tokens: list[int], salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, tokens, salt)
    return keys


def test_a_turn_goes_where_the_one_before_it_was() -> None:
    affinity = Affinity()
    chat = list(range(100))
    affinity.learn(keys_of(chat), "a")
    affinity.learn(keys_of(list(range(500, 600))), "b")
    assert affinity.near(keys_of([*chat, *range(60)])) == ("a",)
    assert affinity.near(keys_of(chat, "another salt")) == ()
    assert affinity.near(keys_of(list(range(7)))) == (), "less than a block"


def test_what_all_have_in_common_speaks_for_nobody() -> None:
    affinity = Affinity()
    system = list(range(32))
    for number in range(2):
        affinity.learn(keys_of([*system, *range(900 - number, 1000)]), "a")
    assert affinity.near(keys_of([*system, *range(100, 200)])) == ()
    assert affinity.near(keys_of([*system, *range(100, 120)])) == ("a",), "but where it is most of the prompt"


def test_an_answer_that_is_written_in_other_tokens_does_not_hide_its_question() -> None:
    affinity = Affinity()
    question = list(range(40))
    for _ in range(2):  # asked again it is the same text, and not another one that begins alike
        affinity.learn(keys_of([*question, *range(200, 300)]), "a")
    assert affinity.near(keys_of([*question, *range(300, 400)])) == ("a",)


def test_who_was_sent_it_last_comes_first_and_who_is_gone_is_forgotten() -> None:
    affinity = Affinity()
    keys = keys_of(list(range(64)))
    affinity.learn(keys, "a", "chat")
    affinity.learn(keys, "b")
    assert affinity.near(keys) == ("b", "a")
    assert affinity.near(keys, "chat") == ("a", "b"), "its session's own, where it is known there"
    affinity.forget({"a"})
    assert affinity.near(keys, "chat") == ("b",)
    affinity.forget({"b"})
    assert affinity.near(keys) == () and len(affinity) == 0


def test_a_session_has_its_replica_without_a_common_beginning() -> None:
    affinity = Affinity()
    affinity.learn([], "a", "chat")
    assert affinity.near(keys_of(list(range(50))), "chat") == ("a",)


def test_the_index_is_bounded_and_forgets_ends_before_beginnings() -> None:
    affinity = Affinity(most_keys=6)
    first, second = keys_of(list(range(64))), keys_of(list(range(100, 164)))
    affinity.learn(first, "a", "one")
    affinity.learn(second, "b", "two")
    assert len(affinity) == 6
    assert affinity.near(second) == ("b",)
    assert affinity.near(first[:2]) == ("a",) and affinity.near(first[2:]) == ()
    for number in range(5):
        affinity.learn([], "c", str(number))
    assert affinity.near([], "one") == () and affinity.near([], "two") == ("b",)


def test_of_what_all_replicas_know_the_latest_are_remembered() -> None:
    affinity, keys = Affinity(), keys_of(list(range(64)))
    for number in range(MOST_HOLDERS + 2):
        affinity.learn(keys, str(number))
    assert affinity.near(keys) == tuple(str(number) for number in range(MOST_HOLDERS + 1, 1, -1))


def test_the_replica_that_knows_the_text_comes_before_the_least_busy() -> None:
    assert rank(Wish(near=("b",)), {"a": 0, "b": 3, "c": 1}) == ["b", "a", "c"]
    assert rank(Wish(), {"a": 2, "b": 3, "c": 1}) == ["c", "a", "b"]
    assert rank(Wish(near=("a", "b")), {"a": 5, "b": 3, "c": 0})[0] == "b", "of several who know it the least busy"


@pytest.mark.parametrize(("load", "first"), [(8, "b"), (9, "a"), (30, "a")])
def test_nobody_is_sent_to_an_overloaded_replica_for_what_it_knows(load: int, first: str) -> None:
    assert rank(Wish(near=("b",)), {"a": 0, "b": load}, slack=8)[0] == first
    assert rank(Wish(near=("b",)), {"a": 10, "b": load + 20}, slack=8)[0] == first


def test_wishes_are_kept_or_waited_for() -> None:
    loads = {"a": 0, "b": 1}
    assert rank(Wish(only="b"), loads) == ["b"]
    assert rank(Wish(only="gone"), loads) == []
    assert rank(Wish(near=("a",), avoid=frozenset({"a"})), loads) == ["b"]
    assert rank(Wish(avoid=frozenset({"a", "b"})), loads) == []


def test_a_wish_fits_who_has_its_target_and_its_pair() -> None:
    info = ModelInfo("m", 64, 100, "float32", "cpu", "moa", {}, 0, target="target", pair="pair")
    assert Wish().fits(info) and Wish("target").fits(info) and Wish("target", pair="pair").fits(info)
    assert not Wish("another", pair="pair").fits(info) and not Wish("target", pair="another").fits(info)


def test_equally_busy_replicas_are_taken_by_chance() -> None:
    assert {rank(Wish(), {"a": 1, "b": 1, "c": 1})[0] for _ in range(100)} == {"a", "b", "c"}


def test_a_request_counts_from_its_choice_to_its_end() -> None:
    loads = Loads()
    for request_id in ("x", "y", "z"):
        loads.begin(request_id)
    assert loads.of("a") == 0, "none has been chosen"
    loads.place("x", "a")
    loads.place("y", "a")
    loads.place("z", "b")
    assert (loads.of("a"), loads.of("b")) == (2, 1)
    loads.place("y", "b")
    assert (loads.of("a"), loads.of("b")) == (1, 2), "its first choice was gone"
    loads.end("x")
    loads.end("x")
    loads.place("x", "a")
    assert loads.of("a") == 0, "what has ended does not come back"


def test_requests_of_others_count_too() -> None:
    loads = Loads()
    loads.hear({"a": 3})
    loads.begin("x")
    loads.place("x", "a")
    assert (loads.of("a"), loads.of("b")) == (4, 0)
    loads.hear({"b": 1})
    assert (loads.of("a"), loads.of("b")) == (1, 1), "what was said last holds"
