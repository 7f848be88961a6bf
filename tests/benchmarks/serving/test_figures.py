"""What loads come to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.serving.arrivals import Arrival
from benchmarks.serving.client import Outcome
from benchmarks.serving.figures import Percentiles, Row, baseline, doubts, figures, pooled
from benchmarks.serving.hosting import Cost
from benchmarks.serving.measuring import Run
from benchmarks.serving.slo import Slo

FAILED = Outcome(late=0.0, end=1.0, error="no answer")


def outcome(first: float, end: float, tokens: int = 11, **more: Any) -> Outcome:
    return Outcome(late=0.0, first=first, end=end, tokens=tokens, prompt_tokens=10, text="same", **more)


def run(way: str, outcomes: Sequence[Outcome], *, round: int = 0, seconds: float = 10.0, **more: Any) -> Run:
    arrivals = [Arrival(float(number), number, 16, number, True) for number in range(len(outcomes))]
    return Run(way, 2.0, round, arrivals, outcomes, seconds, seconds, Cost(5.0, 4.0, 0.1), 0.02, **more)


def of(rows: Sequence[Row], way: str) -> Any:
    return pooled(rows)[2.0, way]


def test_percentiles_lie_on_the_line_between_values() -> None:
    # Rank (n - 1)·p: of 1 … 11 the median is the 6th, p90 the 10th, p99 nine tenths from the 10th to the 11th.
    found = Percentiles.of([11, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert found == Percentiles(mean=6.0, p50=6.0, p90=10.0, p99=pytest.approx(10.9))
    assert Percentiles.of([4.0]) == Percentiles(4.0, 4.0, 4.0, 4.0)
    assert Percentiles.of([]) is None


def test_latencies_throughput_and_goodput_are_of_what_was_answered_in_time() -> None:
    answers = [outcome(0.1, 1.1, gaps=(0.4, 0.6)), outcome(0.3, 1.3), outcome(0.9, 1.9), FAILED]
    (row, by_round) = figures([run("off", answers)], Slo(ttft=0.5), {})
    found = row.figures
    assert (row.round, by_round.round) == (None, 0) and by_round.figures == found
    assert (found.requests, found.failed, found.tokens) == (4, 1, 33)
    assert found.ttft is not None and found.ttft.p50 == pytest.approx(0.3)
    assert found.tpot is not None and found.tpot.p99 == pytest.approx(0.1)
    assert found.itl is not None and found.itl.p50 == pytest.approx(0.5)
    assert (found.requests_per_second, found.tokens_per_second, found.goodput) == pytest.approx((0.3, 3.3, 0.2))
    # The one that failed was on its way for a second too.
    assert found.in_flight == pytest.approx((1.1 + 1.3 + 1.9 + 1.0) / 10)
    assert (found.busy, found.server_cpu, found.others_cpu_share) == pytest.approx((0.5, 4 / 33, 0.01))
    assert found.speed_up is None and found.tau is None


def test_rounds_are_pooled_over_all_their_time() -> None:
    runs = [run("off", [outcome(0.1, 1.0)] * 2, seconds=2.0), run("off", [outcome(0.1, 1.0)] * 4, round=1, seconds=1.0)]
    rows = figures(runs, None, {})
    assert [row.round for row in rows] == [None, 0, 1]
    assert [row.figures.requests_per_second for row in rows] == pytest.approx([2.0, 1.0, 4.0])


def test_acceptance_is_of_verifications_that_carried_a_draft() -> None:
    answers = [outcome(0.1, 1, drafts=4, accepted=8, passes=7), outcome(0.1, 1, drafts=1, accepted=1, passes=3)]
    found = of(figures([run("tree", answers)], None, {}), "tree")
    assert found.tau == pytest.approx(1 + 9 / 5) and found.tokens_per_pass == pytest.approx(22 / 10)
    assert found.drafted == pytest.approx(5 / 10)
    plain = of(figures([run("off", [outcome(0.1, 1, drafts=0, accepted=0, passes=11)])], None, {}), "off")
    assert plain.tau == 1.0


def test_speed_ups_pair_the_same_requests_and_leave_out_what_failed_either_way() -> None:
    plain = [run("off", [outcome(0.2, 4.0), outcome(0.2, 6.0), FAILED, outcome(0.2, 3.0)])]
    plain.append(run("off", [outcome(0.2, 8.0)], round=1))
    fast = [run("tree", [outcome(0.1, 2.0), outcome(0.4, 2.0), outcome(0.1, 1.0), FAILED])]
    # Half as many tokens in a quarter of the time: twice as fast.
    fast.append(run("tree", [replace(outcome(0.2, 2.0), tokens=5.5, text="other")], round=1))  # type: ignore[arg-type]
    rows = figures([*plain, *fast], None, baseline(plain))
    up = of(rows, "tree").speed_up
    assert (up.pairs, up.same) == (3, 2)
    assert (up.e2e.p25, up.e2e.median, up.e2e.p75) == pytest.approx((2.0, 2.0, 2.5))
    assert up.ttft.median == pytest.approx(1.0) and up.e2e_by_round == pytest.approx((2.5, 2.0))
    assert of(rows, "off").speed_up.e2e.median == 1.0


def test_a_generator_that_is_late_or_busy_is_told_of() -> None:
    good = run("off", [outcome(0.1, 1.0)] * 10)
    assert doubts(figures([good], None, {})) == []
    late = run("tree", [replace(outcome(0.1, 1.0), late=0.02)] * 10)
    busy = replace(run("chain", [outcome(0.1, 1.0)] * 10), client_share=0.8)
    told = doubts(figures([good, late, busy], None, {}))
    assert told == [
        "1 of 3 loads had a hundredth of their requests sent more than 5 ms late, tree at 2/s 20.0 ms",
        "1 of 3 loads kept the generator busy, chain at 2/s 80% of the time",
    ]


@pytest.mark.parametrize(
    ("limits", "met"),
    [
        ("ttft:500ms", True),
        ("ttft:499ms", False),
        ("tpot:0.1s", True),
        ("tpot:99.9ms", False),
        ("e2e:1.5s, ttft:1s", True),
        ("e2e:1.4s,ttft:1s", False),
    ],
)
def test_an_answer_keeps_all_limits_or_is_not_good(limits: str, met: bool) -> None:
    assert Slo.parse(limits).met_by(outcome(0.5, 1.5)) is met
    assert not Slo.parse(limits).met_by(FAILED)


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft:500", "ttft:fast", "p99:1s", "ttft:1s tpot:1s", "ttft:-1s", "ttft:0.0.1s", "ttft:.s"]
)
def test_limits_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no limit such as ttft:500ms"):
        Slo.parse(text)


def test_without_limits_five_times_what_an_idle_server_takes() -> None:
    found = Slo.of_idle_server([outcome(0.1, 1.1), outcome(0.2, 2.2), outcome(0.3, 3.3)])
    assert found == Slo(ttft=pytest.approx(1.0), tpot=pytest.approx(1.0))
    assert found.line() == "the first token within 1 s, each token after it within 1 s"
    assert Slo.parse("ttft:.5s,tpot:12.5ms,e2e:90s").line() == (
        "the first token within 500 ms, each token after it within 12.5 ms, the end within 90 s"
    )
