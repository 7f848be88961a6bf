"""Asking /v1/responses, and reading what it answers as openai's package does."""

import asyncio
import json
from typing import Any

import httpx
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_item import ResponseItem
from pydantic import TypeAdapter

from app.main import create_app
from app.settings import Settings
from tests.app.fakes import FakeEngine

URL = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)


def body_of(**extra: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": "Hi", **extra}


async def created(client: httpx.AsyncClient, **extra: Any) -> dict[str, Any]:
    response = await client.post(URL, json=body_of(**extra))
    assert response.status_code == 200, response.text
    document: dict[str, Any] = response.json()
    Response.model_validate(document)
    return document


def text_of(document: dict[str, Any]) -> str:
    return Response.model_validate(document).output_text


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The stream's events; its bytes must be nothing but a name and data each, and what openai's package knows."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *blocks, end = response.text.split("\n\n")
    assert end == ""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENT.validate_python(event)
        events.append(event)
    return events


async def ended(client: httpx.AsyncClient, response_id: str) -> dict[str, Any]:
    """A background response after its end."""
    while (document := (await client.get(f"{URL}/{response_id}")).json())["status"] in ("queued", "in_progress"):
        await asyncio.sleep(0.001)
    return dict(document)


def client_of(engine: FakeEngine, **settings: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(Settings(**settings), engine), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")
