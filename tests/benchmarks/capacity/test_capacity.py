from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli import cli
from benchmarks.capacity.costs import (
    Costs,
    CostsError,
    EngineCosts,
    HttpCosts,
    SessionCosts,
    Step,
    Workload,
    costs_dict,
    read_costs,
)
from benchmarks.capacity.engine_costs import Timed, fit_reading, undisturbed
from benchmarks.capacity.planning import WAYS, Goals, Limits, carry, needs, saturation
from benchmarks.capacity.replica import Kept, Replica, Turn
from benchmarks.capacity.session_costs import Traffic, TurnCost, session_costs
from benchmarks.capacity.simulating import simulate_requests, simulate_sessions

ENGINE = EngineCosts((Step(1, 0.01, 1.0), Step(8, 0.02, 1.0)), 0.002, 0.0001, 0.0, 8, 2048, 4096)
KEPT = SessionCosts(5000, 5000, 5000, 5000, 5, 1, 0.001, 1e-5, 1e-6, 1e-4)
COSTS = Costs("made up", "computed: for tests", ENGINE, KEPT, HttpCosts(0.001, 3e-5, 200))


def served(replica: Replica, *turns: Turn) -> list[Turn]:
    for turn in turns:
        replica.offer(turn)
    ended: list[Turn] = []
    while replica.next_ready < float("inf"):
        replica.now = replica.next_ready
        ended += replica.step()
    return ended


def test_a_turn_alone_takes_what_its_parts_take() -> None:
    (turn,) = served(Replica(COSTS), Turn(0, 0.0, 100, 11))
    assert turn.first == pytest.approx(0.002 + 100 * 0.0001 + 0.001)  # one pass, its tokens, HTTP
    assert turn.ended == pytest.approx(0.002 + 100 * 0.0001 + 10 * 0.01)
    assert (turn.read, turn.known, turn.fetched) == (100, 0, 0)


def test_texts_that_run_together_share_steps() -> None:
    engine = replace(ENGINE, read_pass=0.0, read_token=0.0)
    turns = served(Replica(replace(COSTS, engine=engine)), *(Turn(number, 0.0, 16, 11) for number in range(8)))
    assert len(turns) == 8
    assert {round(turn.ended, 9) for turn in turns} == {0.2}  # ten steps of eight


def test_drafts_make_answers_shorter_in_steps() -> None:
    engine = replace(ENGINE, steps=(Step(1, 0.01, 2.0),))
    plain, drafted = (served(Replica(replace(COSTS, engine=each)), Turn(0, 0.0, 16, 101))[0] for each in (ENGINE, engine))
    assert drafted.ended - drafted.first == pytest.approx((plain.ended - plain.first) / 2, abs=0.01)


def test_no_more_texts_run_than_there_are_slots() -> None:
    turns = served(Replica(replace(COSTS, engine=replace(ENGINE, slots=2))), *(Turn(n, 0.0, 16, 11) for n in range(3)))
    assert turns[2].first > turns[0].ended


def test_a_prefix_is_known_here_or_fetched_or_read_anew() -> None:
    turns = []
    for here, redis_tokens in ((True, 0.0), (False, 1e9), (False, 0.0)):
        replica = Replica(COSTS, redis_tokens=redis_tokens)
        replica.prefixes.keep(7, 320)
        replica.redis.keep(7, 320)
        turns += served(replica, Turn(7, 0.0, 400, 2, here=here))
    assert [(turn.known, turn.fetched, turn.read) for turn in turns] == [(320, 0, 80), (320, 320, 80), (0, 0, 400)]
    assert turns[1].first == pytest.approx(turns[0].first + 320 * KEPT.fetch_token)


def test_a_fetch_brings_what_comes_in_time() -> None:
    replica = Replica(replace(COSTS, sessions=replace(KEPT, fetch_token=0.001, fetch_timeout=0.1)))
    replica.redis.keep(7, 320)
    (turn,) = served(replica, Turn(7, 0.0, 400, 2, here=False))
    assert turn.fetched == 96  # whole blocks of a hundred tokens


def test_the_longest_unused_gives_way() -> None:
    kept = Kept(100)
    kept.keep(1, 40)
    kept.keep(2, 40)
    kept.keep(1, 48)
    kept.keep(3, 40)
    assert [kept.tokens(each) for each in (1, 2, 3)] == [48, 0, 40]
    assert kept.total == 88


def test_only_what_is_new_is_written() -> None:
    replica = Replica(COSTS)
    first, second = (served(replica, Turn(1, 0.0, prompt, 9))[0] for prompt in (120, 200))
    assert (first.written, second.written) == (128, 208 - 128)


def test_sessions_read_little_where_their_prefix_is() -> None:
    engine = replace(ENGINE, prefix_tokens=1 << 20)
    stuck, anywhere = (
        simulate_sessions(
            replace(COSTS, engine=engine),
            Workload(affinity=affinity, think=10),
            20,
            seconds=200,
            warm_up=20,
            seed=0,
            redis_tokens=0.0,
        )
        for affinity in (1.0, 0.0)
    )
    assert anywhere.read == pytest.approx(anywhere.prompt)
    assert stuck.read < 0.4 * stuck.prompt
    assert stuck.turns_per_second == pytest.approx(20 / (10 + stuck.e2e_mean), rel=0.1)


def test_requests_of_their_own_queue_as_a_queue_does() -> None:
    # An engine with one slot, one second for each request: a queue with deterministic service.
    engine = replace(ENGINE, steps=(Step(1, 0.0, 1.0),), read_pass=1.0, read_token=0.0, slots=1)
    requests = [(0.0, 16, 1), (0.5, 16, 1), (5.0, 16, 1)]
    found = simulate_requests(replace(COSTS, engine=engine, http=HttpCosts(0, 0, 0)), requests, shares_core=False)
    assert found.ttft_mean == pytest.approx((1.0 + 1.5 + 1.0) / 3)
    assert found.busy == pytest.approx(3 / 6)


def test_stricter_goals_carry_fewer_sessions_and_needs_grow_with_sessions() -> None:
    workload = Workload(think=5)
    wide, strict = (
        carry(COSTS, workload, WAYS[0], Goals(2.0, tpot), seconds=60, seed=0, progress=lambda: None) for tpot in (0.05, 0.02)
    )
    assert 0 < strict.sessions < wide.sessions
    few, many = (needs(COSTS, wide, count, Limits(), 0.25) for count in (10_000, 100_000))
    assert many.redis_in == pytest.approx(10 * few.redis_in) and many.ingress_cpu == pytest.approx(10 * few.ingress_cpu)
    assert many.replicas == -(-100_000 // (wide.sessions * 0.75))
    ends = saturation(COSTS, wide, Limits())
    assert list(ends.values()) == sorted(ends.values())
    full = needs(COSTS, wide, round(ends["one Redis' memory"]), Limits(), 0.0)
    assert full.redis_memory == pytest.approx(Limits().redis_memory, rel=1e-3)


def test_without_redis_nothing_is_asked_of_it() -> None:
    found = carry(COSTS, Workload(think=5), WAYS[2], Goals(2.0, 0.05), seconds=30, seed=0, progress=lambda: None)
    one = needs(COSTS, found, 1000, Limits(), 0.0)
    assert (one.redis_commands, one.redis_cpu, one.redis_in, one.redis_out, one.redis_memory, one.redis_servers) == (0,) * 6


def test_reading_is_fitted() -> None:
    engine = replace(ENGINE, read_pair=1e-7)
    found = fit_reading({length: engine.read(length, 0) for length in (16, 64, 256, 1024, 1900)}, 512)
    assert found == pytest.approx((0.002, 0.0001, 1e-7), rel=1e-6)
    assert min(fit_reading({16: 0.01, 64: 0.01, 256: 0.02}, 512)) >= 0


def test_runs_whose_processor_was_taken_do_not_count() -> None:
    times = [Timed(1.0, 0.99), Timed(1.1, 1.09), Timed(5.0, 1.01), Timed(4.0, 1.2)]
    assert undisturbed(times, alone=False) == pytest.approx(1.05)
    assert undisturbed(times, alone=True) == pytest.approx(1.05)
    assert undisturbed(times[2:], alone=True) == pytest.approx(1.105)


def test_traffic_of_turns_becomes_costs() -> None:
    first = TurnCost(1000, 24, 0, 0.3, 0.2, Traffic(133, 5_120_000, 0, 5_120_000, 0.02048))
    same = TurnCost(1040, 16, 1008, 0.03, 0.03, Traffic(74, 0, 0, 0, 0.002))
    other = TurnCost(1040, 16, 1008, 0.0804, 0.03, Traffic(140, 0, 5_040_000, 0, 0.00704))
    found = session_costs({"first": [first], "same server": [same], "another server": [other], "unknown": []})
    assert (found.written_bytes, found.stored_bytes, found.fetched_bytes) == (5000, 5000, 5000)
    assert found.write_cpu == pytest.approx(2e-5)
    assert found.fetch_cpu == pytest.approx(5e-6)
    assert found.fetch_token == pytest.approx(5e-5)
    assert found.turn_cpu == pytest.approx(0.002 - 48 * 2e-5)


def test_costs_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    for told, message in (
        ("{", "cannot be used"),
        ('{"costs": {"model": "m"}}', "engine: Field required"),
        ("[]", "cannot be used"),
    ):
        path.write_text(told)
        with pytest.raises(CostsError, match=message):
            read_costs(path)
    path.write_text(json.dumps({"costs": costs_dict(COSTS)}))
    assert read_costs(path) == COSTS


def test_the_command_keeps_a_plan_and_its_picture(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"costs": costs_dict(COSTS)}))
    arguments = ["bench", "capacity", "--costs", str(path), "--out", str(tmp_path / "plan"), "--seconds", "10", "--think", "5"]
    result = CliRunner().invoke(cli, [*arguments, "--sessions", "1000"])
    assert result.exit_code == 0, result.output
    kept = json.loads((tmp_path / "plan/capacity.json").read_text())
    assert kept["plans"].keys() == set(WAYS)
    assert kept["plans"][WAYS[0]][0]["sessions"] == 1000
    assert (tmp_path / "plan/capacity.png").read_bytes().startswith(b"\x89PNG")
    wrong = CliRunner().invoke(cli, ["bench", "capacity", "--costs", str(tmp_path / "none.json")])
    assert wrong.exit_code == 1 and "none.json cannot be used" in wrong.output
