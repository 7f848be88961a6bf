"""What steps are expected to cost."""

from __future__ import annotations

import time
from itertools import count

import pytest

from speculative import cost_measuring
from speculative.cost_measuring import measure_costs
from speculative.costs import MeasuredCosts, StepCosts, StepTimes
from tests.speculative.conftest import MakeEngine, request, run

MEASURED = MeasuredCosts(
    steps={1: {0: 1.0, 1: 1.2, 4: 1.5}, 4: {0: 2.0, 1: 2.8, 4: 6.0}},
    drafts={1: (0.3, 0.1), 4: (0.6, 0.2)},
)


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all batch sizes, however busy the machine is."""
    monkeypatch.setattr(cost_measuring, "ENOUGH_SECONDS", float("inf"))


def costs() -> StepCosts:
    return StepCosts(MEASURED)


def test_what_was_measured_is_expected() -> None:
    assert costs().plain(1, 0) == 1.0
    assert costs().verification(4, 0, 4) == 6.0
    assert costs().draft(4, 1) == 0.6
    assert costs().draft(1, 3) == pytest.approx(0.5)
    assert costs().level(4) == pytest.approx(0.2)


def test_between_and_beyond_lines_are_drawn() -> None:
    assert costs().plain(2, 0) == pytest.approx(1 + 1 / 3)
    assert costs().plain(7, 0) == pytest.approx(3.0)
    assert costs().verification(1, 0, 2) == pytest.approx(1.3)
    assert costs().verification(1, 0, 7) == pytest.approx(1.8)


def test_of_one_size_alone_others_are_taken_to_be_multiples() -> None:
    alone = StepCosts(MeasuredCosts({1: {0: 1.0, 2: 1.4}}, {1: (0.3, 0.1)}))
    assert alone.plain(3, 0) == pytest.approx(3.0)
    assert alone.verification(3, 0, 2) == pytest.approx(4.2)


def test_steps_keep_them_current() -> None:
    current = costs()
    for _ in range(200):
        current.observe(StepTimes(1, 0, 0, False, 0.0, 3.0))
    assert current.plain(1, 0) == pytest.approx(3.0, rel=0.01)
    # A slower machine verifies more slowly too; how much more shows when it does.
    assert 1.2 < current.verification(1, 0, 1) / 1.2 < 3.0
    for _ in range(200):
        current.observe(StepTimes(1, 0, 4, True, 0.5, 4.5))
        current.observe(StepTimes(1, 0, 0, False, 0.0, 3.0))
    assert current.verification(1, 0, 4) == pytest.approx(4.5, rel=0.02)
    assert current.plain(1, 0) == pytest.approx(3.0, rel=0.02)


def test_one_slow_step_is_not_believed() -> None:
    current = costs()
    current.observe(StepTimes(1, 0, 0, False, 0.0, 1000.0))
    assert current.plain(1, 0) < 1.1


@pytest.mark.parametrize("drafter", ["moa", "entry and block", "eagle3", "independent", "ngram"])
def test_measuring_leaves_no_trace(drafter: str, make_engine: MakeEngine) -> None:
    engine, untouched = (make_engine(drafter=drafter, max_num_seqs=3) for _ in range(2))
    policy, own = engine.policy, engine.drafter
    measured = measure_costs(engine)
    assert sorted(measured.steps) == sorted(measured.drafts) == [1, 2, 3]
    assert all(sorted(of_size) == [0, 1, 2, 4, 8] for of_size in measured.steps.values())
    assert all(seconds > 0 for of_size in measured.steps.values() for seconds in of_size.values())
    # More nodes take no less time, whatever disturbed the machine meanwhile.
    assert all(list(of_size.values()) == sorted(of_size.values()) for of_size in measured.steps.values())
    assert (engine.policy, engine.drafter) == (policy, own)
    assert not engine.has_work and engine.clock.steps == 0 and len(engine.prefixes.index) == 0
    asked = [request(str(number), (5, 9, 23, 41, 7, 9, 23), max_tokens=15, seed=number) for number in range(5)]
    first, second = (run(each, asked) for each in (engine, untouched))
    tokens = [{name: [o.new_token_ids for o in outputs] for name, outputs in each.items()} for each in (first, second)]
    assert tokens[0] == tokens[1]


def test_who_shares_the_processor_is_not_taken_for_costs(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a server measures as it starts beside others stays: the processor's time counts, one look a phase here."""
    looks = count()
    monkeypatch.setattr(time, "thread_time", lambda: float(next(looks)))
    engine = make_engine(max_num_seqs=1)
    measured = measure_costs(engine)
    assert set(measured.steps[1].values()) == {2.0}  # verified and committed
    assert measured.drafts[1] == (1.0, 0.0)


def test_a_batch_size_for_which_there_is_no_time_is_calculated(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_measuring, "ENOUGH_SECONDS", 0.001)
    measured = measure_costs(make_engine(max_num_seqs=4))
    assert list(measured.steps) == list(measured.drafts) == [1]
    assert StepCosts(measured).plain(4, 0) == pytest.approx(4 * measured.steps[1][0])


def test_short_texts_begin_anew_while_measuring(make_engine: MakeEngine) -> None:
    assert sorted(measure_costs(make_engine(max_model_len=16, max_num_seqs=2)).steps) == [1, 2]


LONG = MeasuredCosts(MEASURED.steps, MEASURED.drafts, length=10, tokens={0: 0.01, 4: 0.02})


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 2, "prefill_chunk": 1, "max_model_len": 96},
        {"max_num_seqs": 8, "prefill_chunk": 4, "max_model_len": 64, "draft_nodes": 1, "draft_depth": 1},
        {"max_num_seqs": 32, "max_model_len": 22},
    ],
)
def test_texts_that_end_before_others_begin_are_not_waited_for(make_engine: MakeEngine, settings: dict[str, int]) -> None:
    measured = measure_costs(make_engine(drafter="ngram", **settings))
    assert next(iter(measured.steps)) == 1 and max(measured.steps) <= settings["max_num_seqs"]


def test_what_texts_hold_beyond_what_was_measured_with_costs_more() -> None:
    known = StepCosts(LONG)
    assert known.plain(4, 40) == 2.0
    assert known.plain(4, 140) == pytest.approx(2.0 + 100 * 0.01)
    assert known.verification(4, 140, 4) == pytest.approx(6.0 + 100 * 0.02)
    assert known.plain(4, 20) == 2.0


def test_long_texts_do_not_make_drafts_look_dear() -> None:
    """Were lengths taken for the machine's pace, verifying would be expected to take as many times longer as a plain step does."""
    known = StepCosts(LONG)
    for _ in range(300):
        known.observe(StepTimes(4, 340, 0, False, 0.0, 2.0 + 300 * 0.015))
    assert known.plain(4, 340) == pytest.approx(6.5, rel=0.02)
    apart = known.verification(4, 340, 4)
    as_pace = 6.0 * 6.5 / 2.0
    assert 6.0 + 300 * 0.02 < apart < 0.85 * as_pace


def test_sizes_keep_their_own_pace() -> None:
    """What slows steps of single texts is not what slows those of many."""
    current = costs()
    for _ in range(200):
        current.observe(StepTimes(1, 0, 1, True, 0.0, 2.4))
    assert current.verification(1, 0, 1) == pytest.approx(2.4, rel=0.02)
    assert current.verification(4, 0, 1) == 2.8
    assert current.plain(1, 0) > 1.2


def test_lengths_are_measured(make_engine: MakeEngine) -> None:
    measured = measure_costs(make_engine(max_num_seqs=2, max_model_len=400))
    assert measured.length == 64 and sorted(measured.tokens) == [0, 4]
    assert all(seconds > 0 for seconds in measured.tokens.values())
    # Texts of a short context cannot be much longer than others.
    assert measure_costs(make_engine(max_num_seqs=2, max_model_len=200)).tokens == {}


def test_telling_the_drafter_of_a_prompt_is_measured(make_engine: MakeEngine) -> None:
    assert measure_costs(make_engine(drafter="entry", max_num_seqs=2)).prompt > 0


def test_a_prompt_that_takes_far_longer_than_others_counts_for_little() -> None:
    """The first ones meet cold memory, or the machine's other work."""
    current = costs()
    current.observe_prompt(1.0)
    current.observe_prompt(100.0)
    assert current.prompt == pytest.approx(1.1)
    for _ in range(100):
        current.observe_prompt(0.5)
    assert current.prompt == pytest.approx(0.5, rel=0.01)


def test_a_step_of_a_kind_that_comes_seldom_counts_for_more_where_it_was_faster() -> None:
    """What holds a step up need not be what such steps take; nothing hurries one."""
    faster, slower = costs(), costs()
    for current, seconds in ((faster, 0.5), (slower, 2.0)):
        expected = current.plain(1, 0)
        for _ in range(20):
            current.observe(StepTimes(1, 0, 1, True, 0.0, current.verification(1, 0, 1)))
        current.observe(StepTimes(1, 0, 0, False, 0.0, seconds * expected))
    assert faster.plain(1, 0) == pytest.approx(0.5**0.7 * costs().plain(1, 0))
    assert slower.plain(1, 0) == pytest.approx(2.0**0.1 * costs().plain(1, 0))
