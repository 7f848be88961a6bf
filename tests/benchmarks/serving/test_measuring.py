"""A whole measurement, of a scripted server in place of real ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.prompts import Prompt
from benchmarks.serving import measuring
from benchmarks.serving.arrivals import Workload
from benchmarks.serving.client import Address
from benchmarks.serving.drawing import draw
from benchmarks.serving.figures import pooled
from benchmarks.serving.hosting import Form, Other, Place, ServerError, hosted
from benchmarks.serving.keeping import CompareError, check_same_requests, read, rows, write
from benchmarks.serving.measuring import ALONE, FULL, WARM_UP, Plan, Results, measure
from benchmarks.serving.report import failing, print_results, write_all
from benchmarks.serving.ways import Own
from tests.benchmarks.serving.scripted import OK, Scripted, scripted, three_words

PROMPTS = [Prompt("test", (1, 2), "Hi", ({"role": "user", "content": "Hi"},), 4), Prompt("test", (3,), "Ho", answer_tokens=9)]
BEFORE = 2 * WARM_UP + ALONE + FULL * 3


def plan(**changes: Any) -> Plan:
    return replace(
        Plan(
            host=Own((), (), 3),
            ways=["off", "tree"],
            workload=Workload(PROMPTS, seconds=0, fewest=4, warm_up=1, max_tokens=32, fixed_tokens=None, seed=5),
            rates=[200.0, 400.0],
            of_capacity=False,
            with_capacity=True,
            rounds=2,
            at_once=3,
            body={"temperature": 0.5},
            slo=None,
            timeout=30.0,
            server_cores=None,
            client_cores=None,
        ),
        **changes,
    )


@dataclass
class Watched:
    expected: int = 0
    answered_: int = 0
    noted_: int = 0
    begun: list[str] = field(default_factory=list)

    def expect(self, requests: int, seconds: float) -> None:
        self.expected = requests

    def begin(self, what: str) -> None:
        self.begun.append(what)

    def answered(self) -> None:
        self.answered_ += 1

    def noted(self) -> None:
        self.noted_ += 1


def stand_in(monkeypatch: pytest.MonkeyPatch, server: Scripted) -> None:
    """All ways are asked of ``server``, which cannot be asked what it has cost."""

    @asynccontextmanager
    async def places(host: Any, ways: Sequence[str], cores: Any) -> AsyncIterator[list[Place]]:
        yield [Place(way, Address.of(server.url), "tokens", {"way": way}, {"plain": True}) for way in ways]

    monkeypatch.setattr(measuring, "hosted", places)


async def measured(monkeypatch: pytest.MonkeyPatch, asked: Plan) -> tuple[Results, list[dict[str, Any]], Watched]:
    results, watched = Results(), Watched()
    async with scripted() as server:
        stand_in(monkeypatch, server)
        await measure(asked, results, watched)
    return results, server.bodies, watched


async def test_every_way_gets_the_same_requests_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    results, bodies, watched = await measured(monkeypatch, plan())
    assert watched.answered_ == watched.expected == len(bodies) - BEFORE == 2 * 2 * 2 * 5
    assert watched.noted_ == 4 and watched.begun[0] == "off, 200/s, round 1 of 2"
    assert [run.way for run in results.runs] == ["off", "tree", "tree", "off"] * 2
    loads = [bodies[BEFORE + place : BEFORE + place + 5] for place in range(0, watched.expected, 5)]
    asked = [{body["seed"]: body | {"way": None} for body in load} for load in loads]
    for first, second in zip(asked[::2], asked[1::2], strict=True):
        assert first == second
    assert asked[0] != asked[4]  # another round
    assert {body["max_tokens"] for body in loads[0]} == {4, 9}
    assert {"temperature": 0.5, "stream": True, "stream_options": {"include_usage": True}}.items() <= loads[0][0].items()
    assert all(len(run.outcomes) == len(run.arrivals) == 4 for run in results.runs)  # the first of five warmed up


async def test_throughput_is_over_the_time_in_which_requests_came(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = plan(ways=["off"], rates=[5.0], rounds=1)
    results, _, _ = await measured(monkeypatch, asked)
    (run,) = results.runs
    # Five requests in a second, whose first warms up: nobody asks in the last tenth, and that is time too.
    assert run.seconds >= 1 - run.arrivals[0].at > run.arrivals[-1].at - run.arrivals[0].at
    assert pooled(rows(results))[5.0, "off"].requests_per_second == pytest.approx(4 / run.seconds)


async def test_rates_may_be_shares_of_what_plain_decoding_sustains(monkeypatch: pytest.MonkeyPatch) -> None:
    results, bodies, _ = await measured(monkeypatch, plan(rates=[0.25, 1.0], of_capacity=True, rounds=1))
    assert results.capacity is not None and results.capacity.tokens_per_second == pytest.approx(
        3 * results.capacity.requests_per_second
    )
    assert list(results.rates) == pytest.approx([results.capacity.requests_per_second * share for share in (0.25, 1)], rel=1e-3)
    assert {run.rate for run in results.runs} == set(results.rates)
    # Capacity and what an idle server takes are plain decoding's.
    assert ["plain" in body for body in bodies] == [False] * 2 * WARM_UP + [True] * (ALONE + FULL * 3) + [False] * 20
    assert results.slo is not None and results.alone is not None and results.slo.ttft == pytest.approx(5 * results.alone.ttft)


async def test_requests_that_fail_are_counted_and_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def some_fail(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if body["way"] == "tree" and body["seed"] % 2 and body["seed"] > 100:
            writer.write(b"HTTP/1.1 429 Busy\r\nContent-Length: 7\r\n\r\n[/full]")
        else:
            await three_words(body, writer)

    asked = plan(rounds=2, workload=replace(plan().workload, seed=1000))
    results = Results()
    async with scripted(some_fail) as server:
        stand_in(monkeypatch, server)
        await measure(asked, results, Watched())
    found = pooled(rows(results))
    assert [found[200.0, way].failed for way in ("off", "tree")] == [0, 4]
    up = found[200.0, "tree"].speed_up
    assert up is not None and up.pairs == 4
    assert "FAILED: tree, 200/s: 4 requests: 429: [/full]" in failing(results)
    assert any(line.startswith("FAILED: tree, 200/s, round 1: 1 warming up") for line in failing(results))
    print_results(results, asked, None, ["It was a test."])
    told = capsys.readouterr().out
    assert "4 of 8" in told and "429: [/full]" in told and "It was a test." in told


async def test_a_server_that_fails_from_the_first_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad\r\nContent-Length: 14\r\n\r\nunknown: top_x")

    async with scripted(fails) as server:
        stand_in(monkeypatch, server)
        with pytest.raises(ServerError, match="off, warming up: 8 of 8 requests failed, the first with: 400: unknown: top_x"):
            await measure(plan(at_once=8), Results(), Watched())


async def test_results_are_kept_without_text_and_another_measurement_is_put_beside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = plan()
    results, _, _ = await measured(monkeypatch, asked)
    write(results, asked, None, ["a note"], tmp_path / "first")
    told = json.loads((tmp_path / "first" / "results.json").read_text())
    assert told["provenance"]["commit"] and told["notes"] == ["a note"] and "three" not in json.dumps(told)
    assert len(told["runs"]) == 8 and len(told["figures"]) == 4 * 3
    assert all(len(column) == 4 for run in told["runs"] for column in run["requests"].values())
    kept = read(tmp_path / "first")
    assert kept.name == "first" and {row.way for row in kept.rows} == {"off (first)", "tree (first)"}
    assert {key: pytest.approx(each.tokens_per_second, rel=1e-4) for key, each in pooled(kept.rows).items()} == {
        (rate, f"{way} (first)"): each.tokens_per_second for (rate, way), each in pooled(rows(results)).items()
    }
    check_same_requests(kept, asked)
    later, _, _ = await measured(monkeypatch, replace(asked, ways=["tree"], rates=list(kept.rates), slo=kept.slo))
    beside = rows(later, kept.plain)
    assert all(row.figures.speed_up is not None and row.figures.speed_up.same == row.figures.requests for row in beside)
    pictures = draw(pooled([*beside, *kept.rows]), tmp_path / "pictures", what="a test", capacity=300.0)
    assert [path.name for path in pictures] == ["latency.png", "throughput.png", "speed-up.png"]
    assert all(path.stat().st_size > 10_000 for path in pictures)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 1}, "rounds 1 here, 2 there"),
        ({"body": {"temperature": 0.0}}, "parameters"),
        ({"workload": replace(plan().workload, seed=6)}, "seed 6 here, 5 there; digest"),
        ({"host": Other("x", "http://x", None, None, "chat", {})}, "asked as tokens, this would be as chat: see --ask"),
    ],
)
async def test_measurements_that_ask_something_else_are_not_put_beside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    results = Results(rates=[200.0, 400.0])
    write(results, plan(), None, [], tmp_path)
    with pytest.raises(CompareError, match=message):
        check_same_requests(read(tmp_path), plan(**changes))


@pytest.mark.parametrize("content", ["{", "[]", '{"figures": []}'])
def test_files_of_something_else_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(CompareError, match="holds no results of bench serving"):
        read(path)


@pytest.mark.parametrize(
    ("form", "asked"),
    [
        ("tokens", {"prompt": [1, 2]}),
        ("text", {"prompt": "Hi"}),
        ("chat", {"messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
async def test_other_servers_are_asked_by_the_name_that_they_have_for_their_model(form: Form, asked: dict[str, Any]) -> None:
    async def models(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await three_words(_, writer)

    async with scripted(models) as server:
        other = Other("theirs", server.url, None, "their-model", form, {"top_k": 1})
        async with hosted(other, ["theirs"], None) as (place,):
            request = place.request(PROMPTS[0], {"max_tokens": 3}, plain=True)
    head, _, body = request.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/chat/completions " if form == "chat" else b"POST /v1/completions ")
    assert asked.items() <= json.loads(body).items()
    assert {"model": "their-model", "top_k": 1, "max_tokens": 3}.items() <= json.loads(body).items()
    assert "speculative" not in json.loads(body)


async def test_a_server_that_names_no_model_is_asked_for_one() -> None:
    async def nothing(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(OK)

    async with scripted(nothing) as server:
        address = server.url
    with pytest.raises(ServerError, match="no server answers"):
        async with hosted(Other("gone", address, None, None, "chat", {}), ["gone"], None):
            pass


@pytest.mark.parametrize(("status", "why"), [(401, "is --api-key right"), (404, "is this where its routes stand, with /v1")])
async def test_a_server_that_tells_no_models_may_be_somewhere_else(status: int, why: str) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\n\r\n".encode())
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ServerError, match=f"/models says {status}: {why}"):
            async with hosted(Other("x", f"http://127.0.0.1:{port}", None, None, "chat", {}), ["x"], None):
                pass


async def test_pictures_tell_the_rounds_that_were_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[str] = []
    monkeypatch.setattr("benchmarks.serving.drawing.draw", lambda *_, what, **__: told.append(what) or [])
    results, _, _ = await measured(monkeypatch, plan(ways=["off"], rates=[400.0], rounds=2))
    write_all(results, plan(rounds=9), None, [], tmp_path)  # as if it had been interrupted
    assert told == ["2 prompts, answers of at most 32 tokens, 2 rounds"]


def test_our_servers_draft_as_their_ways_say() -> None:
    own = Own(["--model", "x"], ["--draft-nodes", "5"], 2)
    chain, tree, adaptive, bare = (own.command(name) for name in ("chain", "tree", "adaptive", "bare"))
    assert chain[-10:-2] == ["--draft-policy", "fixed", "--draft-breadth", "1", "--draft-depth", "2", "--draft-nodes", "2"]
    assert tree[-4:] == ["--draft-nodes", "5", "--draft-policy", "fixed"] and adaptive[-1] == "adaptive"
    assert bare[-2:] == ["--drafter", "none"]
    assert all(command[command.index("--prefix-cache-tokens") :][:2] == ["--prefix-cache-tokens", "0"] for command in (chain, bare))
