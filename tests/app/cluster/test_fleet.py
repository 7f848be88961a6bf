"""How replicas are called."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from speculative.replicas.messages import Told, Wish
from speculative.request import Request, SamplingParams

context = pytest.importorskip("ray.serve.context", reason="needs the extra ray")


class Method:
    """Stands in for a handle; it notes which request Serve takes a call for."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Wish]] = []
        self.deployment_name, self.generate = "engine", self

    def options(self, **_: Any) -> Method:
        return self

    def remote(self, *_: Any, wish: Wish) -> AsyncGenerator[Told, None]:
        self.seen.append((context._get_serve_request_context()._internal_request_id, wish))

        async def told() -> AsyncGenerator[Told, None]:
            yield Told("replica", 0.0)

        return told()


async def test_choices_of_one_http_request_are_calls_of_their_own() -> None:
    from app.cluster.fleet import RayFleet

    method = Method()

    async def nothing() -> None:
        return None

    fleet = RayFleet(lambda: nothing(), nothing)  # type: ignore[arg-type, return-value]
    fleet._handle = method  # type: ignore[assignment]
    context._set_request_context(_internal_request_id="of the HTTP request")
    for number in range(2):
        request = Request(f"choice-{number}", (1, 2), SamplingParams(max_tokens=1))
        assert [told.replica async for told in fleet.generate(request, Wish("target"))] == ["replica"]
    assert method.seen == [("", Wish("target"))] * 2, "with an id of its own each, as Serve gives where there is none"
    assert context._get_serve_request_context()._internal_request_id == "of the HTTP request"
