"""How replicas are called."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import TYPE_CHECKING, Any

import pytest

from speculative.errors import EngineStepError, ReplicaLostError
from speculative.replicas.messages import Told, Wish
from speculative.request import OfferedTree, Request, RequestOutput, RequestStats, SamplingParams

pytest.importorskip("app.cluster.fleet", reason="needs the extra ray")

from ray import exceptions
from ray.serve import context

from app.cluster.board import loads_of

if TYPE_CHECKING:
    from app.cluster.fleet import RayFleet


class Handle:
    """Stands in for a deployment's; it notes which request Serve takes a call for."""

    deployment_name = "engine"

    def __init__(self, outcome: Exception | None = None) -> None:
        self.seen: list[tuple[str, Wish]] = []
        self.cancelled = 0
        self._outcome = outcome
        self.answered = asyncio.Event()

    @property
    def generate(self) -> Handle:
        return self

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, request: Request, listener: str, wish: Wish) -> Handle:
        self.seen.append((context._get_serve_request_context()._internal_request_id, wish))
        return self

    def __await__(self) -> Generator[Any, None, None]:
        yield from self.answered.wait().__await__()
        if self._outcome is not None:
            raise self._outcome

    def cancel(self) -> None:
        self.cancelled += 1


def fleet_of(handle: Handle) -> RayFleet:
    from app.cluster.fleet import RayFleet

    async def nothing() -> None:
        return None

    fleet = RayFleet(lambda: nothing(), nothing)  # type: ignore[arg-type, return-value]
    fleet._handle = handle  # type: ignore[assignment]
    return fleet


def request(request_id: str = "text") -> Request:
    return Request(request_id, (1, 2), SamplingParams(max_tokens=1))


def last(request_id: str = "text") -> Told:
    return Told(request_id, "replica", 0.0, RequestOutput(request_id, (1,), "x", "length", RequestStats()))


async def test_choices_of_one_http_request_are_calls_of_their_own() -> None:
    handle = Handle()
    fleet = fleet_of(handle)
    context._set_request_context(_internal_request_id="of the HTTP request")
    for number in range(2):
        messages = fleet.generate(request(f"choice-{number}"), Wish("target"))
        coming = asyncio.ensure_future(anext(messages))
        while len(handle.seen) == number:
            await asyncio.sleep(0)
        fleet._inboxes.deal([last(f"choice-{number}")])
        assert (await coming).replica == "replica"
        await messages.aclose()
    assert handle.seen == [("", Wish("target"))] * 2, "with an id of its own each, as Serve gives where there is none"
    assert context._get_serve_request_context()._internal_request_id == "of the HTTP request"
    assert not handle.cancelled, "what has ended is not cancelled"


async def begun(handle: Handle) -> tuple[RayFleet, AsyncGenerator[Told, None]]:
    """A fleet, and what is told of a text that a replica has taken."""
    fleet = fleet_of(handle)
    messages = fleet.generate(request(), Wish())
    coming = asyncio.ensure_future(anext(messages))
    while not handle.seen:
        await asyncio.sleep(0)
    fleet._inboxes.deal([Told("text", "replica", 0.0)])
    await coming
    return fleet, messages


async def test_a_replica_has_room_for_another_once_an_end_is_told() -> None:
    handle = Handle()
    fleet, messages = await begun(handle)
    loads = loads_of(handle.deployment_name)
    assert loads.of("replica") == 1
    fleet._inboxes.deal([last()])
    await anext(messages)
    assert loads.of("replica") == 0, "though the call goes on"
    await messages.aclose()


async def test_a_text_that_is_left_is_cancelled_at_its_replica() -> None:
    handle = Handle()
    _, messages = await begun(handle)
    await messages.aclose()
    while not handle.cancelled:
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (exceptions.RayActorError(), ReplicaLostError),
        (exceptions.RayTaskError("generate", "traceback", ValueError("a fault")), EngineStepError),
        (ValueError("a fault"), EngineStepError),
        (None, ReplicaLostError),
    ],
)
async def test_what_becomes_of_a_call_is_told(
    outcome: Exception | None, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.cluster.fleet.ANSWER_S", 0.01)
    handle = Handle(outcome)
    fleet = fleet_of(handle)
    messages = fleet.generate(request(), Wish())
    handle.answered.set()
    with pytest.raises(expected):
        await anext(messages)


async def test_a_text_moves_where_its_replica_takes_no_more_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be let finish, and cannot: what it waits for does not reach it."""
    monkeypatch.setattr("app.cluster.fleet.replicas_of", lambda _: ("another",))
    handle = Handle()
    fleet, messages = await begun(handle)
    with pytest.raises(ReplicaLostError):
        await fleet.offer("replica", "text", OfferedTree(2))
    with pytest.raises(ReplicaLostError, match="the replica is gone"):
        await asyncio.wait_for(anext(messages), 30)
    while not handle.cancelled:
        await asyncio.sleep(0)
