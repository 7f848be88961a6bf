"""A measurement whose requests fail now and then keeps all others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.network import measuring
from benchmarks.network.asking import Answer, AnswerError, Cost
from benchmarks.network.kinds import EAGLE, MOA, PLAIN, SPECULATIVE, Kind, Pair, kinds
from benchmarks.network.links import LINKS
from benchmarks.network.measuring import Plan, Results, Watcher, measure
from benchmarks.network.processes import ProcessError
from benchmarks.network.stage import Place
from benchmarks.network.traffic import Traffic
from benchmarks.prompts import Prompt

ANSWER, COST = Answer("yes", 10, 0.1, 1.0, {}), Cost(Traffic(1, 2), 0.5, 4, None, None)


class FakeStage:
    """Each kind's second request fails; many at once fail with one kind, and another's edges do not start."""

    def __init__(self) -> None:
        self.asked: dict[str, int] = {}

    @classmethod
    @asynccontextmanager
    async def open(cls, *_: Any) -> AsyncIterator[FakeStage]:
        yield cls()

    @asynccontextmanager
    async def place(self, kind: Kind, clients: int = 1) -> AsyncIterator[Place]:
        if clients > 1 and kind.name == EAGLE:
            raise ProcessError("no memory left")
        yield Place(kind, None, ("127.0.0.1", 1), ["http://127.0.0.1:1"] * clients)  # type: ignore[arg-type]

    async def ask(self, place: Place, prompt: Sequence[int], **parameters: Any) -> tuple[Answer, Cost]:
        name = place.kind.name
        self.asked[name] = self.asked.get(name, 0) + 1
        if self.asked[name] == 2:
            raise AnswerError("it broke off")
        return ANSWER, COST

    async def load(self, place: Place, prompts: Sequence[Any], parameters: Sequence[Any]) -> tuple[list[Answer], float, Cost]:
        if place.kind.name == MOA and parameters[0]["temperature"] == 1.0:
            raise AnswerError("one of many broke off")
        return [ANSWER] * len(prompts), 2.0, COST


class FakeTransport:
    def shape(self, link: Any) -> None:
        pass


@asynccontextmanager
async def open_transport(*_: Any) -> AsyncIterator[FakeTransport]:
    yield FakeTransport()


async def test_what_fails_is_noted_and_all_else_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "Stage", FakeStage)
    monkeypatch.setattr(measuring, "open_transport", open_transport)
    every = kinds(Path("bundle"), None, Path("eagle"))
    plan = Plan(
        pair=Pair("bundled", "auto", "float32", "off"),
        kinds=every,
        links=[LINKS["5g"]],
        temperatures=[0.0, 1.0],
        prompts=[Prompt("test", (1,)), Prompt("test", (2,))],
        rounds=3,
        max_tokens=8,
        seed=0,
        clients=2,
        crowded_over=LINKS["5g"],
        transport="relay",
        cores=None,
    )
    results, asked, kept = Results(), list[int](), list[int]()
    watcher = Watcher(lambda: asked.append(len(results.runs)), lambda: kept.append(len(results.runs)))
    await measure(plan, results, watcher)
    assert len(asked) == plan.num_requests
    # One of each kind's twelve failed; what there was was kept after every round.
    assert len(results.runs) == 4 * 11 and kept[:3] == [4 * 3, 4 * 7, 4 * 11]
    assert {run.round for run in results.runs} == {0, 1, 2}
    crowds = [(crowd.kind, crowd.temperature) for crowd in results.crowds]
    assert crowds == [(PLAIN, 0.0), (PLAIN, 1.0), (SPECULATIVE, 0.0), (SPECULATIVE, 1.0), (MOA, 0.0)]
    assert sum("it broke off" in failure for failure in results.failures) == 4
    assert results.failures[-2:] == [
        f"{MOA}, 2 at once, temperature 1: one of many broke off",
        f"{EAGLE}, 2 at once: no memory left",
    ]
