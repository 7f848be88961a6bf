"""Responses that are worked at while nobody waits."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from openai.types.responses import Response

from app.responses_api.background import BackgroundJobs
from tests.app.asking import URL, body_of, client_of, created, ended, text_of
from tests.app.fakes import FakeEngine
from tests.app.test_errors import assert_error


class TestBackground:
    @pytest.fixture
    async def waiting(self, client: httpx.AsyncClient, engine: FakeEngine) -> AsyncIterator[dict[str, Any]]:
        """A response that will never end by itself."""
        engine.hang = True
        document = await created(client, background=True)
        await asyncio.wait_for(engine.hanging.acquire(), 30)
        yield document
        await client.post(f"{URL}/{document['id']}/cancel")

    async def test_it_is_queued_and_comes_to_its_end(self, client: httpx.AsyncClient) -> None:
        document = await created(client, background=True)
        assert (document["status"], document["background"], document["output"]) == ("queued", True, [])
        document = await asyncio.wait_for(ended(client, document["id"]), 30)
        Response.model_validate(document)
        assert (document["status"], text_of(document)) == ("completed", "Hello, world")
        assert (await client.post(f"{URL}/{document['id']}/cancel")).json() == document

    async def test_cancelling_aborts_and_keeps_what_there_is(
        self, client: httpx.AsyncClient, engine: FakeEngine, waiting: dict[str, Any]
    ) -> None:
        url = f"{URL}/{waiting['id']}"
        assert (await client.get(url)).json()["status"] == "in_progress"
        cancelled = (await client.post(f"{url}/cancel")).json()
        Response.model_validate(cancelled)
        assert (cancelled["status"], text_of(cancelled)) == ("cancelled", "Hello, world")
        assert cancelled["output"][0]["status"] == "incomplete"
        assert len(engine.aborted) == 1
        assert (await client.post(f"{url}/cancel")).json() == (await client.get(url)).json() == cancelled

    async def test_it_may_be_cancelled_before_anything_has_happened(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.hang = True
        document = await created(client, background=True)
        assert (await client.post(f"{URL}/{document['id']}/cancel")).json()["status"] == "cancelled"

    async def test_deleting_aborts_and_nothing_comes_back(
        self, client: httpx.AsyncClient, engine: FakeEngine, waiting: dict[str, Any]
    ) -> None:
        url = f"{URL}/{waiting['id']}"
        assert (await client.delete(url)).json()["deleted"] is True
        assert len(engine.aborted) == 1
        assert (await client.get(url)).status_code == 404

    @pytest.mark.parametrize("deleted_first", [True, False])
    async def test_nothing_comes_back_where_it_is_cancelled_at_the_same_time(
        self, client: httpx.AsyncClient, engine: FakeEngine, waiting: dict[str, Any], deleted_first: bool
    ) -> None:
        url = f"{URL}/{waiting['id']}"
        both = [client.delete(url), client.post(f"{url}/cancel")]
        responses = await asyncio.wait_for(asyncio.gather(*(both if deleted_first else both[::-1])), 30)
        deleted, _ = responses if deleted_first else responses[::-1]
        assert deleted.json()["deleted"] is True
        assert len(engine.aborted) == 1
        assert (await client.get(url)).status_code == 404

    async def test_nobody_goes_on_with_it_before_its_end(self, client: httpx.AsyncClient, waiting: dict[str, Any]) -> None:
        response = await client.post(URL, json=body_of(previous_response_id=waiting["id"]))
        assert_error(response, 400, "previous_response_id", "invalid_value")

    async def test_an_error_makes_it_failed(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.error = RuntimeError("secret")
        document = await asyncio.wait_for(ended(client, (await created(client, background=True))["id"]), 30)
        assert (document["status"], document["error"]["code"]) == ("failed", "server_error")

    async def test_where_nothing_is_kept_there_is_none(self, engine: FakeEngine) -> None:
        async with client_of(engine, store_max_responses=0) as client:
            assert_error(await client.post(URL, json=body_of(background=True)), 503, None, "service_unavailable")
            assert (await client.post(URL, json=body_of())).status_code == 200
        assert len(engine.requests) == 1

    async def test_others_cannot_be_cancelled(self, client: httpx.AsyncClient) -> None:
        document = await created(client)
        assert_error(await client.post(f"{URL}/{document['id']}/cancel"), 400, "response_id", "invalid_value")


class TestJobs:
    async def test_all_who_cancel_wait_until_it_is_noted_once(self) -> None:
        jobs, begun, noting, may_note = BackgroundJobs(), asyncio.Event(), asyncio.Event(), asyncio.Event()
        done: list[str] = []

        async def work() -> None:
            begun.set()
            await asyncio.Event().wait()

        async def note() -> None:
            noting.set()
            await may_note.wait()
            done.append("noted")

        async def cancel() -> None:
            await jobs.cancel("me", "resp_1")
            done.append("cancelled")

        jobs.start("me", "resp_1", work(), note, lambda: done.append("ended"))
        await asyncio.wait_for(begun.wait(), 30)
        leaving, *waiting = [asyncio.create_task(cancel()) for _ in range(3)]
        await asyncio.wait_for(noting.wait(), 30)
        waiting.append(asyncio.create_task(cancel()))  # the work has ended, and that is not noted yet
        leaving.cancel()
        await asyncio.wait([leaving])
        await asyncio.sleep(0)  # its turn
        assert done == ["ended"]
        may_note.set()
        await asyncio.wait_for(asyncio.gather(*waiting), 30)
        assert done == ["ended", "noted", *["cancelled"] * 3]
        await cancel()  # there is nothing to cancel any longer
        assert done.count("noted") == 1
