"""The API's description, /openapi.json."""

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from app.description import Described
from tests.app.asking import client_of
from tests.app.fakes import FakeEngine


async def test_the_description_knows_no_422(client: httpx.AsyncClient) -> None:
    description = (await client.get("/openapi.json")).json()
    operations = [operation for path in description["paths"].values() for operation in path.values()]
    assert not any("422" in operation["responses"] for operation in operations)
    assert "ValidationError" not in json.dumps(description)


async def test_the_description_says_where_the_api_is(engine: FakeEngine) -> None:
    async with client_of(engine) as client:
        assert "servers" not in (await client.get("/openapi.json")).json()
    async with client_of(engine, root_path="/llm/") as client:
        for path in ("/llm/openapi.json", "/openapi.json"):
            assert (await client.get(path)).json()["servers"] == [{"url": "/llm"}]


async def test_the_description_is_made_once_and_off_the_event_loop(app: Any, client: httpx.AsyncClient) -> None:
    assert isinstance(app, Described)
    threads, make = [], app.openapi

    def noting() -> dict[str, Any]:
        threads.append(threading.get_ident())
        return make()

    app.openapi = noting
    answers = await asyncio.gather(*(client.get("/openapi.json") for _ in range(3)))
    assert len({answer.content for answer in answers}) == len(threads) == 1
    assert threads != [threading.get_ident()]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_the_description_knows_streams(client: httpx.AsyncClient, path: str) -> None:
    success = (await client.get("/openapi.json")).json()["paths"][path]["post"]["responses"]["200"]
    assert set(success["content"]) == {"application/json", "text/event-stream"}
    assert "$ref" in success["content"]["application/json"]["schema"]
