"""What single runs come to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.network.asking import Answer, Cost
from benchmarks.network.drawing import draw
from benchmarks.network.figures import Spread, crowd_figures, figures
from benchmarks.network.keeping import as_dict
from benchmarks.network.kinds import EAGLE, INDEPENDENT, MOA, PLAIN, SPECULATIVE, Pair, edge_command, kinds, server_command
from benchmarks.network.links import LINKS
from benchmarks.network.measuring import Crowd, Plan, Results, Run
from benchmarks.network.report import print_results, write
from benchmarks.network.traffic import Traffic
from benchmarks.network.verdicts import differing, verdicts
from benchmarks.prompts import Prompt

PAIR = Pair("bundled", "auto", "float32", "off")
EDGE_STATS = {
    "num_spec_steps": 4,
    "num_accepted_draft_tokens": 6,
    "num_server_calls": 5,
    "bytes_sent": 100,
    "bytes_received": 300,
}


def run(
    kind: str, prompt: int, text: str, first: float, seconds: float, link: str = "4g", temperature: float = 0.0, round: int = 0
) -> Run:
    answer = Answer(text, 10, first, seconds, EDGE_STATS if kind == MOA else {})
    return Run(kind, link, temperature, round, prompt, answer, Cost(Traffic(200, 800, 300, 1000, 1), 0.5, 4, 0.6, 0.2))


@pytest.fixture
def results() -> Results:
    crowd = [Answer(text, 10, 0.1, 1.0, {}) for text in ("yes", "no", "yes", "other")]
    return Results(
        [
            run(PLAIN, 0, "yes", 0.1, 1.0),
            run(PLAIN, 1, "no", 0.3, 2.0),
            run(MOA, 0, "yes", 0.2, 0.5),
            run(MOA, 1, "no!", 0.2, 0.5),
        ],
        [Crowd(PLAIN, "5g", 0.0, 2, crowd, 4.0, Cost(Traffic(400, 4000), 2.0, 20, None, None))],
    )


def plan(**changes: object) -> Plan:
    values: dict[str, object] = {
        "pair": PAIR,
        "kinds": kinds(Path("bundle"), None, None)[:2],
        "links": [LINKS["4g"]],
        "temperatures": [0.0],
        "prompts": [Prompt("test", (1,)), Prompt("test", (2,))],
        "rounds": 1,
        "max_tokens": 16,
        "seed": 7,
        "clients": 2,
        "crowded_over": LINKS["5g"],
        "transport": "relay",
        "cores": None,
    }
    return Plan(**(values | changes))  # type: ignore[arg-type]


def test_spreads_have_medians_and_quartiles() -> None:
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(3.0, 2.0, 4.0)


def test_the_spread_over_rounds_is_that_of_their_medians(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    seconds = ((1.0, 2.0, 4.0), (0.5, 1.0, 5.0))
    runs = [run(PLAIN, at, "yes", 0.1, took, round=number) for number, each in enumerate(seconds) for at, took in enumerate(each)]
    found = figures(Results(runs))["4g", 0.0, PLAIN]
    assert found.speed_by_round == (5.0, 10.0) and found.first_by_round == (0.1, 0.1)
    print_results(Results(runs), plan(rounds=2), [])
    assert "5.0–10.0" in capsys.readouterr().out


def test_no_figure_is_cut_short_in_a_narrow_terminal(
    results: Results, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_results(results, plan(), [])
    assert "…" not in capsys.readouterr().out


def test_the_legend_hides_no_title(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures: list[Any] = []
    monkeypatch.setattr("benchmarks.network.drawing.plt.close", pictures.append)
    runs = [run(PLAIN, 0, "yes", 0.1, 1.0), run(SPECULATIVE, 0, "yes", 0.1, 1.0)]
    draw(figures(Results(runs)), tmp_path, what="1 prompt, 2 times each, at most 8 tokens; medians and quartiles")
    for picture in pictures:
        ((legend,), (title,)) = picture.legends, picture.texts
        assert not legend.get_window_extent().overlaps(title.get_window_extent())
    assert len(pictures) == 4


def test_figures_of_an_edge(results: Results) -> None:
    moa = figures(results)["4g", 0.0, MOA]
    assert (moa.runs, moa.tokens, moa.same) == (2, 20, 1)
    assert moa.first.median == 0.2 and moa.speed.median == 20.0
    assert moa.decode_speed is not None and moa.decode_speed.median == pytest.approx(9 / 0.3)
    assert moa.tau == 2.5
    shares = moa.shares
    assert (shares.up, shares.down, shares.wire_up, shares.wire_down) == (20, 80, 30, 100)
    assert (shares.told_up, shares.told_down, shares.server_calls) == (10, 30, 0.5)
    assert (shares.busy, shares.steps, shares.server_cpu, shares.edge_cpu) == (0.05, 0.4, 0.06, 0.02)


def test_a_stream_is_one_call_and_tells_no_bytes(results: Results) -> None:
    plain = figures(results)["4g", 0.0, PLAIN]
    assert plain.shares.server_calls == 2 / 20 and plain.shares.told_up is None
    assert plain.tau == 1.0 and plain.same == 2


def test_capacity_is_of_the_seconds_at_work(results: Results) -> None:
    crowd = crowd_figures(results)[0.0, PLAIN]
    assert (crowd.tokens, crowd.capacity, crowd.speed, crowd.tokens_per_step) == (40, 20.0, 10.0, 2.0)
    assert crowd.shares.server_cpu is None
    # Prompts come again: the third text is the first prompt's, the fourth the second's.
    assert (crowd.same, crowd.runs) == (3, 4)


def test_texts_that_differ_are_counted_and_said(results: Results, capsys: pytest.CaptureFixture[str]) -> None:
    assert differing([*figures(results).values(), *crowd_figures(results).values()]) == (2, 8)
    print_results(results, plan(), ["Network: relay."])
    said = capsys.readouterr().out
    assert "NOT the same: 2 of 8 texts differ" in said and "Network: relay." in said and "Lossless" not in said


def test_equal_texts_are_said_to_be_lossless(capsys: pytest.CaptureFixture[str]) -> None:
    print_results(Results([run(PLAIN, 0, "yes", 0.1, 1.0), run(SPECULATIVE, 0, "yes", 0.1, 1.0)]), plan(), [])
    assert "Lossless: all 2 texts were those of plain streaming." in capsys.readouterr().out


def test_the_verdict_names_who_was_fastest_whoever_that_is(results: Results) -> None:
    (verdict,) = verdicts(figures(results))
    # Plain: medians of 10 and 5 tokens per second, and of 0.1 and 0.3 seconds.
    assert (verdict.by_speed, verdict.speed_ratio) == (MOA, 20 / 7.5)
    assert (verdict.by_first, verdict.first_ratio) == (PLAIN, 1.0)
    assert verdict.line() == (
        "4g, greedy: most tokens per second from edge, MoA (2.67x streaming, plain), first token soonest from streaming, plain"
    )


def test_what_is_kept_has_figures_and_runs_but_no_texts(results: Results, tmp_path: Path) -> None:
    written = write(results, plan(), ["a note"], tmp_path)
    assert [path.name for path in written] == ["results.json", "speed.png", "first-token.png", "server-calls.png", "bytes.png"]
    assert all(path.stat().st_size for path in written)
    kept = written[0].read_text()
    assert '"a note"' in kept and '"provenance"' in kept and "yes" not in kept
    told = as_dict(results)
    assert told["texts"] == {"total": 8, "different_from_plain": 2} and len(told["runs"]) == 4


def test_requests_that_failed_are_said_and_leave_gaps(results: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results.runs += [run(PLAIN, 0, "yes", 0.1, 1.0, link="poor")]
    results.failures.append("edge, MoA, poor, temperature 0: silence")
    links = [LINKS["4g"], LINKS["poor"]]
    print_results(results, plan(links=links), [])
    assert "FAILED, and left out: edge, MoA, poor, temperature 0: silence" in capsys.readouterr().out
    written = write(results, plan(links=links), [], tmp_path)
    assert all(path.stat().st_size for path in written) and "silence" in written[0].read_text()


def test_kinds_that_lack_a_drafter_are_left_out() -> None:
    bundle, other = Path("bundle"), Path("other")
    assert [kind.name for kind in kinds(bundle, None, None)] == [PLAIN, SPECULATIVE, MOA]
    every = kinds(bundle, other, other)
    assert [kind.name for kind in every] == [PLAIN, SPECULATIVE, MOA, INDEPENDENT, EAGLE]
    assert [kind.has_edge for kind in every] == [False, False, True, True, True]
    # An independent drafter asks nothing of the server but its tokens.
    assert [kind.server for kind in every] == ["plain", "moa", "moa", "plain", "eagle"]


def test_every_kind_is_asked_as_often_and_with_the_same_seeds() -> None:
    assert plan().num_requests == 2 * 2 + 2
    assert plan(clients=0, rounds=3, temperatures=[0.0, 1.0]).num_requests == 2 * 2 * 3 * 2
    assert plan().parameters(2, 1.0) == {"temperature": 1.0, "seed": 9, "max_tokens": 16}


def test_commands_name_model_server_and_one_thread() -> None:
    server = server_command(PAIR, "none", "127.0.0.1", 8)
    assert server[3:7] == ["serve", "--host", "127.0.0.1", "--port"]
    assert server[server.index("--drafter") + 1] == "none" and server[server.index("--prefix-cache-tokens") + 1] == "0"
    moa, other = (edge_command(PAIR, kind, ("127.0.0.1", 5)) for kind in kinds(Path("bundle"), Path("small"), None)[2:])
    assert moa[3:6] == ["edge", "--bundle", "bundle"] and "ws://127.0.0.1:5" in moa
    assert other[2] == "benchmarks.network.edge" and other[other.index("--drafter") + 1] == "small"
    assert all(command[command.index("--num-threads") + 1] == "1" for command in (server, moa, other))
    assert not any("--draft-nodes" in command for command in (moa, other))


def test_edges_of_all_kinds_get_the_same_limits() -> None:
    pair = replace(PAIR, draft_nodes=24, draft_window=64)
    every = kinds(Path("bundle"), Path("small"), Path("eagle"))
    for command in (edge_command(pair, kind, ("127.0.0.1", 5)) for kind in every if kind.has_edge):
        assert command[command.index("--draft-nodes") + 1] == "24"
    for drafter in ("none", "moa", "eagle"):
        server = server_command(pair, drafter, "127.0.0.1", 8)
        assert server[server.index("--remote-tree-nodes") + 1] == "24"
        assert ("--draft-window" in server) == (drafter != "none"), "which a server without a drafter refuses"
