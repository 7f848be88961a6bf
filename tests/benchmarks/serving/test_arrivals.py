"""What is sent, and when: random as it should be, and the same again for the same seed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks.prompts import Prompt
from benchmarks.serving.arrivals import Workload

PROMPTS = [Prompt("test", (number, number + 1), answer_tokens=10 * number or None) for number in range(5)]


def workload(**changes: Any) -> Workload:
    return replace(Workload(PROMPTS, seconds=100, fewest=1, warm_up=0, max_tokens=256, fixed_tokens=None, seed=0), **changes)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_requests_come_as_a_poisson_process(seed: int) -> None:
    times = np.array([arrival.at for arrival in workload(seconds=500, seed=seed).arrivals(8.0, 0)])
    assert len(times) == 4000 and (np.diff(times) >= 0).all()
    # Given their number, its times are uniform, and its gaps are exponential.
    assert stats.kstest(times / 500, "uniform").pvalue > 0.01
    assert stats.kstest(np.diff(times) * 8, "expon").pvalue > 0.01
    # And gaps know nothing of each other.
    assert abs(np.corrcoef(np.diff(times)[1:], np.diff(times)[:-1])[0, 1]) < 0.05


def test_a_short_load_has_its_rate_too() -> None:
    few = workload(seconds=1, fewest=6, warm_up=2)
    arrivals = few.arrivals(2.0, 0)
    assert [arrival.counts for arrival in arrivals] == [False] * 2 + [True] * 6
    assert arrivals[0].at > 0 and arrivals[-1].at < 8 / 2.0
    assert few.requests(2.0) == 6 and few.requests(50.0) == 50


def test_the_same_seed_draws_the_same_and_rounds_differ() -> None:
    assert workload().arrivals(3.0, 1) == workload().arrivals(3.0, 1)
    one, other = workload().arrivals(3.0, 0), workload().arrivals(3.0, 1)
    assert [arrival.at for arrival in one] != [arrival.at for arrival in other]
    assert not {arrival.seed for arrival in one} & {arrival.seed for arrival in other}
    assert one != workload(seed=1).arrivals(3.0, 0)


def test_rates_ask_the_same_questions_each_once_before_any_comes_again() -> None:
    slow, fast = workload().arrivals(0.5, 0), workload().arrivals(4.0, 0)
    assert [each.prompt for each in slow] == [each.prompt for each in fast[: len(slow)]]
    for first in range(0, len(slow), len(PROMPTS)):
        assert sorted(each.prompt for each in slow[first : first + len(PROMPTS)]) == [0, 1, 2, 3, 4]


def test_answers_are_as_long_as_the_files_own_and_others_as_drawn() -> None:
    arrivals = workload(seconds=1000).arrivals(4.0, 0)
    for number in (1, 2, 3, 4):
        assert {each.max_tokens for each in arrivals if each.prompt == number} == {10 * number}
    drawn = [each.max_tokens for each in arrivals if each.prompt == 0]
    assert 55 < np.median(drawn) < 73 and max(drawn) == 256 and len(set(drawn)) > 50
    assert {each.max_tokens for each in workload(max_tokens=25).arrivals(4.0, 0) if each.prompt in (3, 4)} == {25}
    assert {each.max_tokens for each in workload(fixed_tokens=17).arrivals(4.0, 0)} == {17}


def test_a_digest_tells_whether_two_measurements_ask_the_same() -> None:
    digest = workload().digest([1.0, 2.0], 2)
    assert digest == workload().digest([1.0, 2.0], 2)
    others = [workload().digest([1.0, 2.5], 2), workload().digest([1.0, 2.0], 1), workload(seed=1).digest([1.0, 2.0], 2)]
    others.append(workload(prompts=[*PROMPTS[:-1], Prompt("test", (9,), answer_tokens=40)]).digest([1.0, 2.0], 2))
    assert len({digest, *others}) == 5
