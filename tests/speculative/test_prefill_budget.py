"""How much of a prompt is read beside running texts, by simulated costs."""

from __future__ import annotations

from statistics import median

import pytest

from speculative.cost_measuring import measure_reading
from speculative.prefill_budget import LEAST, PrefillBudget, ReadingCosts
from tests.speculative.conftest import N0, MakeEngine, request, run, tokens

STEP = 8.0
"""Of sixteen texts, in milliseconds, as are all seconds here."""


def small() -> ReadingCosts:
    """A small network on a CPU: running it costs little, and looking back at a long text much."""
    return ReadingCosts(run=1.0, token=0.08, position=0.00014)


def large() -> ReadingCosts:
    """A large one: its weights are read, which takes longer than many tokens."""
    return ReadingCosts(run=6.0, token=0.02, position=0.00001)


def known(costs: ReadingCosts, most: int = 512, num_running: int = 16, step: float = STEP) -> PrefillBudget:
    budget = PrefillBudget(most, costs)
    budget.observe_step(num_running, step)
    return budget


def read(budget: PrefillBudget, actual: ReadingCosts, length: int, num_running: int = 16, step: float = STEP) -> list[float]:
    """The gaps of the running texts while a prompt is read that costs what ``actual`` says."""
    gaps, start = [], 0
    while start < length:
        budget.begin(num_running)
        count = budget.take(start, length - start)
        seconds = actual.seconds(start, count)
        budget.observe_reading(seconds)
        start += count
        if num_running:
            budget.observe_step(num_running, step)
            gaps.append(seconds + step)
    return gaps


@pytest.mark.parametrize(("start", "seconds"), [(0, 8.0), (500, 8.0), (4000, 8.0), (0, 500.0), (3000, 70.0)])
def test_as_many_tokens_as_take_so_long(start: int, seconds: float) -> None:
    for costs in (small(), large(), ReadingCosts(1.0, 0.1, 0.0)):
        count = costs.count(start, seconds)
        assert costs.seconds(start, count) <= seconds < costs.seconds(start, count + 1)


def test_a_pass_that_takes_too_long_by_itself_reads_nothing() -> None:
    assert large().count(0, 5.0) == large().count(0, 6.0) == 0


@pytest.mark.parametrize("costs", [small, large])
def test_a_long_prompt_holds_up_no_running_text_for_three_of_its_gaps(costs) -> None:
    gaps = read(known(costs()), costs(), 4000)
    assert max(gaps) <= 2.5 * STEP
    whole = sum(read(PrefillBudget(512, costs()), costs(), 4000, num_running=0) or [0.0])
    assert whole == 0.0  # nobody waits


def test_reading_gets_two_thirds_of_a_step() -> None:
    gaps = read(known(small()), small(), 4000)
    assert max(gaps) <= 1.8 * STEP  # the shortest of readings, at the end of a long prompt
    assert median(gaps) == pytest.approx(1.65 * STEP, rel=0.05)
    alone = sum(small().seconds(start, min(512, 4000 - start)) for start in range(0, 4000, 512))
    assert sum(gaps) < 3.2 * alone


def test_a_large_network_is_not_run_for_a_handful_of_tokens() -> None:
    budget = known(large())
    budget.begin(16)
    # Within a step's time there would be 97 tokens, and three quarters of it would go into running it at all.
    assert budget.take(0, 4000) == large().count(0, 1.5 * STEP) > 2 * large().count(0, STEP)


def test_a_prompt_always_goes_on() -> None:
    slow = ReadingCosts(run=100.0, token=10.0, position=0.1)
    budget = known(slow)
    for start in (0, 4000):
        budget.begin(16)
        assert budget.take(start, 4000) == LEAST
    budget.begin(16)
    assert budget.take(0, 3) == 3
    few = known(slow, most=5)
    few.begin(16)
    assert few.take(0, 4000) == 5


def test_where_nothing_runs_a_step_reads_all_it_may() -> None:
    budget = known(small())
    budget.begin(0)
    assert (budget.take(0, 300), budget.take(0, 4000), budget.left) == (300, 212, False)


def test_of_several_prompts_together_no_more_is_read_than_of_one() -> None:
    budget = known(small())
    budget.begin(16)
    count = budget.take(0, 20)
    assert (count, budget.left) == (20, True)
    assert LEAST <= (second := budget.take(0, 4000)) < 512
    assert small().seconds(0, 20) + small().seconds(0, second) <= STEP
    assert budget.take(0, 4000) == 0 and not budget.left


def test_prompts_that_wait_behind_have_more_read_up_to_three_steps() -> None:
    budget = known(small(), most=4000)
    spent = []
    for num_behind in (0, 1, 2, 3, 4, 30):
        budget.begin(16, num_behind)
        spent.append(small().seconds(0, budget.take(0, 4000)) / STEP)
    assert spent == pytest.approx([0.65, 1.3, 1.95, 2.6, 3.0, 3.0], rel=0.02)


def test_before_a_step_of_so_many_texts_as_little_as_may_be_is_read() -> None:
    budget = PrefillBudget(512, small())
    budget.begin(16)
    assert budget.take(0, 4000) == LEAST
    budget.observe_step(1, 5.0)
    budget.begin(16)  # at least as long as one of fewer texts
    assert LEAST < budget.take(0, 4000) == small().count(0, 0.65 * 5.0)


@pytest.mark.parametrize("wrong", [0.4, 2.5])
@pytest.mark.parametrize("part", ["run", "token", "position"])
def test_wrong_costs_are_put_right_by_what_reading_takes(part: str, wrong: float) -> None:
    costs = small()
    setattr(costs, part, getattr(costs, part) * wrong)
    budget = known(costs)
    for _ in range(3):
        read(budget, small(), 4000)
    gaps = read(budget, small(), 4000)
    assert max(gaps) <= 1.9 * STEP
    assert median(gaps) == pytest.approx(1.65 * STEP, rel=0.1)


@pytest.mark.parametrize(
    ("step", "start", "allowed"),
    [(0.002, 100, 0.010), (0.010, 511, 0.010), (0.002, 512, 0.008), (0.005, 512, 0.005), (0.010, 512, 0.0065), (0.02, 0, 0.013)],
)
def test_what_nobody_notices_is_always_allowed(step: float, start: int, allowed: float) -> None:
    costs = ReadingCosts(0.001, 5e-5, 1e-8)
    budget = PrefillBudget(512, costs)
    for _ in range(100):
        budget.observe_step(1, step)
    budget.begin(1)
    assert budget.take(start, 4000) == costs.count(start, allowed)


def test_one_slow_reading_is_not_believed() -> None:
    budget = known(small())
    budget.begin(16)
    before = budget.take(0, 4000)
    budget.observe_reading(10_000.0)
    budget.begin(16)
    assert budget.take(0, 4000) > 0.8 * before


def test_the_usual_step_follows_the_texts() -> None:
    budget = known(small(), step=8.0)
    for _ in range(100):
        budget.observe_step(16, 24.0)
    budget.begin(16)
    assert budget.take(0, 4000) == pytest.approx(small().count(0, 0.65 * 24.0), abs=2)


def test_steps_beside_a_prompt_hardly_change_what_is_usual() -> None:
    budget = known(small(), step=8.0)
    for _ in range(20):
        budget.begin(16)
        budget.take(0, 4000)
        budget.observe_step(16, 24.0)
    budget.begin(16)
    assert small().count(0, 0.65 * 8.0) <= budget.take(0, 4000) < small().count(0, 0.65 * 9.0)


def test_what_reading_costs_is_measured_and_leaves_no_trace(make_engine: MakeEngine) -> None:
    engine = make_engine()
    costs = measure_reading(engine)
    assert costs is not None and min(costs.run, costs.token, costs.position) > 0
    assert not engine.has_work and engine.clock.steps == 0 and len(engine.prefixes.index) == 0
    assert engine.scheduler.budget.most == 512
    assert measure_reading(make_engine(prefill_chunk=LEAST)) is None
    assert measure_reading(make_engine(max_model_len=2 * LEAST)) is None


@pytest.mark.parametrize("drafter", ["none", "moa", "eagle3", "independent", "ngram"])
def test_texts_are_the_same_however_a_long_prompt_is_cut(make_engine: MakeEngine, drafter: str) -> None:
    long = request("long", [7 + number * 37 % 150 for number in range(100)], max_tokens=12, temperature=0.9, seed=5)
    others = [request(str(number), [3 + number, 9], max_tokens=40, temperature=0.7, seed=number) for number in range(3)]
    expected = {}
    for each in (long, *others):
        expected |= tokens(run(make_engine(N0, "none", max_num_seqs=1), [each]))
    for costs in (ReadingCosts(1e-9, 1e-9, 1e-12), ReadingCosts(1e-9, 2e-5, 1e-9), ReadingCosts(10.0, 1.0, 1.0)):
        engine = make_engine(N0, drafter, max_num_seqs=4, draft_window=9 if drafter == "moa" else None)
        engine.scheduler.budget.costs = costs
        # The long prompt comes last, so that the others run while it is read.
        assert tokens(run(engine, [*others, long])) == expected
