import random

import pytest

from speculative.detokenizer import Detokenizer
from speculative.prefill_budget import ReadingCosts
from speculative.request import OfferedTree, Request
from speculative.sampler import Sampler
from speculative.scheduler import LONG, Scheduler, SlotMove
from speculative.sequence import Sequence


def sequence(name: str, prompt: int, priority: int = 0, *, remote: bool = False) -> Sequence:
    request = Request(name, tuple(range(prompt)), priority=priority, remote=remote)
    sampler = Sampler(request.params, 0, request.prompt_token_ids, ())
    return Sequence(request, sampler, 1000, Detokenizer(None), list(range(prompt)))


def spans(scheduler: Scheduler) -> list[tuple[str, int, int]]:
    run = []
    for chunk in scheduler.schedule():
        chunk.sequence.num_computed = chunk.end
        run.append((chunk.sequence.request.request_id, chunk.start, chunk.end))
    return run


def test_a_prompt_is_prefilled_whole() -> None:
    scheduler = Scheduler(num_slots=2, prefill_chunk=100)
    scheduler.add(sequence("a", 10))
    assert spans(scheduler) == [("a", 0, 10)]
    assert [s.request.request_id for s in scheduler.running] == ["a"]


def test_long_prompts_come_in_chunks_and_the_next_fills_what_is_left() -> None:
    scheduler = Scheduler(num_slots=4, prefill_chunk=8)
    scheduler.add(sequence("long", 20))
    scheduler.add(sequence("short", 4))
    assert spans(scheduler) == [("long", 0, 8)]
    assert spans(scheduler) == [("long", 8, 16)]
    assert spans(scheduler) == [("long", 16, 20), ("short", 0, 4)]
    assert [s.slot for s in scheduler.running] == [0, 1]
    scheduler.check_integrity()


def test_only_prompts_behind_the_one_that_is_read_have_more_read() -> None:
    scheduler = Scheduler(num_slots=8, prefill_chunk=1000)
    scheduler.add(sequence("running", 10))
    spans(scheduler)
    scheduler.budget.costs = ReadingCosts(run=0.0, token=0.001, position=0.0)
    scheduler.budget.observe_step(1, 0.1)
    scheduler.add(sequence("long", 1000))
    assert spans(scheduler) == [("long", 0, 65)]
    scheduler.add(sequence("behind", 500))
    assert spans(scheduler) == [("long", 65, 195)]
    scheduler.add(sequence("and another", 500))
    assert spans(scheduler) == [("long", 195, 390)]


def test_what_is_known_of_a_prompt_is_not_computed_again() -> None:
    def know(sequence: Sequence) -> None:
        sequence.num_computed = 6

    scheduler = Scheduler(num_slots=1, prefill_chunk=8, admitted=know)
    scheduler.add(sequence("a", 10))
    assert spans(scheduler) == [("a", 6, 10)]


def test_requests_wait_for_a_slot_in_order() -> None:
    scheduler = Scheduler(num_slots=2, prefill_chunk=100)
    for name in "abcd":
        scheduler.add(sequence(name, 5))
    spans(scheduler)
    assert [s.request.request_id for s in scheduler.running] == ["a", "b"]
    scheduler.remove(scheduler.running[0])
    assert spans(scheduler) == [("c", 0, 5)]


def test_the_last_sequence_moves_into_the_gap() -> None:
    scheduler = Scheduler(num_slots=3, prefill_chunk=100)
    a, b, c = (sequence(name, 5) for name in "abc")
    for each in (a, b, c):
        scheduler.add(each)
    spans(scheduler)
    assert scheduler.remove(a) == [SlotMove(2, 0, 5)]
    assert [s.request.request_id for s in scheduler.running] == ["c", "b"]
    assert scheduler.remove(b) == []
    scheduler.check_integrity()


def test_the_prefilling_sequence_follows_when_a_slot_below_it_is_freed() -> None:
    scheduler = Scheduler(num_slots=3, prefill_chunk=6)
    a, long = sequence("a", 5), sequence("long", 50)
    scheduler.add(a)
    scheduler.add(long)
    spans(scheduler)
    assert scheduler.prefilling is long and long.num_computed == 1
    assert scheduler.remove(a) == [SlotMove(1, 0, 1)]
    assert long.slot == 0
    scheduler.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_leave_no_gap_and_lose_nobody(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(num_slots=5, prefill_chunk=16)
    alive: dict[str, Sequence] = {}
    # What stands in each slot, moved as the engine would move the cache.
    stored: dict[int, str] = {}
    for step in range(200):
        if rng.random() < 0.4:
            alive[str(step)] = sequence(str(step), rng.randint(1, 60))
            scheduler.add(alive[str(step)])
        spans(scheduler)
        active = [*scheduler.running, *([scheduler.prefilling] if scheduler.prefilling else [])]
        for each in active:
            stored.setdefault(each.slot, each.request.request_id)
            assert stored[each.slot] == each.request.request_id
        if alive and rng.random() < 0.4:
            gone = alive.pop(rng.choice(sorted(alive)))
            slot = gone.slot
            if slot >= 0:
                del stored[slot]
            for move in scheduler.remove(gone):
                stored[move.destination] = stored.pop(move.source)
        scheduler.check_integrity()
        assert {s.request.request_id for s in (*active, *scheduler.waiting)} >= set(alive)
        assert all(scheduler.find(name) is each for name, each in alive.items())


def test_urgent_requests_begin_first_and_equals_in_order() -> None:
    scheduler = Scheduler(num_slots=1, prefill_chunk=100)
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0), ("e", -1)):
        scheduler.add(sequence(name, 3, priority))
    begun = []
    while scheduler.has_work:
        spans(scheduler)
        begun.append(scheduler.running[0].request.request_id)
        scheduler.remove(scheduler.running[0])
    assert begun == ["c", "e", "a", "d", "b"]


def begun(scheduler: Scheduler) -> list[str]:
    return [name for name, _, _ in spans(scheduler)]


@pytest.mark.parametrize(("num_slots", "most"), [(8, 6), (3, 2), (2, 1)])
def test_where_texts_wait_for_edges_in_most_slots_others_go_before_more_of_them(num_slots: int, most: int) -> None:
    scheduler = Scheduler(num_slots, prefill_chunk=100)
    for name in range(20):
        scheduler.add(sequence(f"remote {name}", 3, remote=True))
    for name in range(2 * num_slots):
        scheduler.add(sequence(f"other {name}", 3))
    order = begun(scheduler)
    assert order == [f"remote {name}" for name in range(most)] + [f"other {name}" for name in range(num_slots - most)]
    scheduler.remove(scheduler.running[-1])
    assert begun(scheduler) == [f"other {num_slots - most}"]
    scheduler.remove(scheduler.running[0])
    assert begun(scheduler) == [f"remote {most}"], "below that it is first come, first served"
    scheduler.check_integrity()


def test_texts_that_wait_for_edges_give_way_to_their_equals_alone() -> None:
    scheduler = Scheduler(num_slots=4, prefill_chunk=100)
    for name in "abcde":
        scheduler.add(sequence(name, 3, remote=True))
    scheduler.add(sequence("less urgent", 3, priority=1))
    assert begun(scheduler) == ["a", "b", "c", "d"]
    scheduler.remove(scheduler.running[0])
    assert begun(scheduler) == ["e"]
    scheduler.remove(scheduler.running[0])
    assert begun(scheduler) == ["less urgent"]


def test_texts_that_have_their_trees_wait_for_no_edge() -> None:
    scheduler = Scheduler(num_slots=4, prefill_chunk=100)
    for name in "abc":
        scheduler.add(sequence(name, 3, remote=True))
    begun(scheduler)
    for each in scheduler.running:
        each.offered = OfferedTree(3, (), ())
    scheduler.add(sequence("d", 3, remote=True))
    scheduler.add(sequence("other", 3))
    assert begun(scheduler) == ["d"]


def test_a_long_prompts_text_waits_for_the_step_that_others_wait_for() -> None:
    scheduler = Scheduler(num_slots=3, prefill_chunk=100)
    scheduler.add(sequence("running", 10))
    spans(scheduler)
    scheduler.add(sequence("long", 60))
    spans(scheduler)
    running, long = scheduler.running
    long.num_target_calls = LONG - 1
    assert scheduler.batch(have_waited=True) == [running, long], "a prompt of a few stretches is not long"
    long.num_target_calls = LONG
    assert scheduler.batch(have_waited=True) == [running]
    assert scheduler.batch() == [running, long]
    long.num_computed += 1
    assert scheduler.batch(have_waited=True) == [running, long], "once is enough"
    long.num_computed -= 1
    scheduler.remove(running)
    assert scheduler.batch(have_waited=True) == [long], "alone it waits for nobody"
