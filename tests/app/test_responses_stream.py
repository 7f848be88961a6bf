"""/v1/responses, streamed: the same response, event by event."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.app.asking import URL, body_of, client_of, created, events_of, text_of
from tests.app.fakes import FakeEngine
from tests.app.test_disconnect import Caller
from tests.app.test_errors import assert_error


class TestStream:
    async def test_the_order_of_events(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.script = ("Hé\n", "", "llo", "")  # a step may add no text, and the last often adds none
        events = events_of(await client.post(URL, json=body_of(stream=True)))
        assert [event["type"] for event in events] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert [event["delta"] for event in events if "delta" in event] == ["Hé\n", "llo"]
        first, last = events[0]["response"], events[-1]["response"]
        assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
        assert last["output"] == [events[-2]["item"]]
        assert (events[2]["item"]["id"], events[2]["item"]["status"]) == (last["output"][0]["id"], "in_progress")
        assert events[6]["text"] == text_of(last) == "Hé\nllo"

    @pytest.mark.parametrize("finish", ["stop", "length"])
    async def test_it_ends_with_what_a_response_that_does_not_stream_is(
        self, client: httpx.AsyncClient, engine: FakeEngine, finish: str
    ) -> None:
        engine.finish = finish
        extra = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
        whole = await created(client, **extra)
        events = events_of(await client.post(URL, json=body_of(stream=True, **extra)))
        streamed = events[-1]["response"]
        assert events[-1]["type"] == f"response.{whole['status']}"
        assert (await client.get(f"{URL}/{streamed['id']}")).json() == streamed
        logprobs = [each for event in events if "delta" in event for each in event["logprobs"]]
        assert logprobs == whole["output"][0]["content"][0]["logprobs"]
        for document in (whole, streamed):
            document["output"][0].pop("id")
            for own in ("id", "created_at", "completed_at"):
                document.pop(own)
        assert streamed == whole

    async def test_an_answer_without_text_is_an_empty_message(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.script = ("",)
        events = events_of(await client.post(URL, json=body_of(stream=True)))
        assert not any("delta" in event for event in events)
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""

    async def test_an_error_midway_is_a_failed_response(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.error = RuntimeError("secret")
        response = await client.post(URL, json=body_of(stream=True))
        assert "secret" not in response.text
        *events, failed = events_of(response)
        assert "".join(event.get("delta", "") for event in events) == "Hello, world"
        assert failed["type"] == "response.failed"
        document = failed["response"]
        assert document["status"] == "failed"
        assert document["error"] == {
            "code": "server_error",
            "message": "The server had an error while processing your request.",
        }
        assert document["output"][0]["status"] == "incomplete"
        assert len(engine.aborted) == 1

    @pytest.mark.parametrize("stream", [False, True])
    async def test_leaving_aborts_and_nothing_is_kept(self, app: Any, engine: FakeEngine, stream: bool) -> None:
        engine.hang = True
        caller = Caller(body_of(stream=stream))
        caller.scope |= {"path": URL, "raw_path": URL.encode()}
        answering = asyncio.create_task(app(caller.scope, caller.receive, caller.send))
        await asyncio.wait_for(engine.hanging.acquire(), 30)
        caller.gone.set()
        await asyncio.wait_for(answering, 30)
        (aborted,) = engine.aborted
        assert await app.state.serving.store.get("", aborted.removesuffix("-0")) is None

    async def test_too_long_is_a_failed_response(self, engine: FakeEngine) -> None:
        engine.hang = True
        async with client_of(engine, request_timeout=0.05) as client:
            assert_error(await client.post(URL, json=body_of()), 408, None, "request_timeout")
            *_, failed = events_of(await client.post(URL, json=body_of(stream=True)))
        assert "longer than 0.05 seconds" in failed["response"]["error"]["message"]
        assert len(engine.aborted) == 2
