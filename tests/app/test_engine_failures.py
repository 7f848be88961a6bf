"""What callers and probes see when a step of the engine fails, or does not end: a real engine thread behind the application."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from speculative.async_engine import AsyncEngine
from speculative.request import Request
from tests.app.fakes import events
from tests.app.scripted import ScriptedEngine, served, tokens_of

TEXT = "/v1/completions"
ANSWER = "Good morning, San José! 🙂"


async def until(condition: Callable[[], bool]) -> None:
    async def holds() -> None:
        while not condition():
            await asyncio.sleep(0)

    await asyncio.wait_for(holds(), 30)


def assert_internal(error: dict[str, Any]) -> None:
    assert error == {
        "error": {
            "message": "The server had an error while processing your request.",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_a_step_that_raises_fails_the_requests_in_it_and_no_others(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    all_asked, failures = threading.Event(), iter([RuntimeError("secret path /etc")])

    def fail_once_two_run(engine: ScriptedEngine) -> None:
        assert all_asked.wait(10)
        if len(engine.running) == 2 and engine.waiting:
            for failure in failures:
                raise failure

    scripted = ScriptedEngine([tokens_of(ANSWER)], slots=2, before_step=fail_once_two_run)
    body = {"prompt": "Hi", "max_tokens": 100, "stream": stream}
    async with served(scripted) as (client, engine):
        asked = []
        for count in range(1, 4):
            asked.append(asyncio.create_task(client.post(TEXT, json=body)))
            await until(lambda count=count: len(engine._streams) == count)
        all_asked.set()
        responses = await asyncio.wait_for(asyncio.gather(*asked), 30)
        again = await client.post(TEXT, json=body | {"stream": False})
        assert scripted.status().num_running == 0
    *failed, good = responses
    if stream:
        assert all(response.status_code == 200 for response in responses)
        for response in failed:
            assert_internal(events(response)[-1])
        assert "".join(chunk["choices"][0]["text"] for chunk in events(good)) == ANSWER
    else:
        for response in failed:
            assert response.status_code == 500
            assert_internal(response.json())
            assert response.headers["x-request-id"]
        assert good.json()["choices"][0]["text"] == ANSWER
    assert again.json()["choices"][0]["text"] == ANSWER
    assert "secret" not in "".join(response.text for response in responses)
    logged = [record for record in caplog.records if record.exc_info]
    assert [str(record.exc_info[1]) for record in logged if record.exc_info] == ["secret path /etc"]  # once, with its traceback


async def test_health_turns_while_a_step_does_not_end(caplog: pytest.LogCaptureFixture) -> None:
    goes_on = threading.Event()

    def hold(_: ScriptedEngine) -> None:
        assert goes_on.wait(20)

    async with served(ScriptedEngine([tokens_of(ANSWER)], before_step=hold), watchdog_timeout=0.02) as (client, engine):

        async def until_health(status: int) -> httpx.Response:
            while (response := await client.get("/health")).status_code != status:
                await asyncio.sleep(0)
            return response

        assert (await client.get("/health")).status_code == 200
        asked = asyncio.create_task(client.post(TEXT, json={"prompt": "Hi", "max_tokens": 100}))
        response = await asyncio.wait_for(until_health(503), 30)
        assert response.json()["error"]["code"] == "service_unavailable"
        assert any(record.levelno == logging.ERROR and "one step" in record.getMessage() for record in caplog.records)
        goes_on.set()
        assert (await asked).json()["choices"][0]["text"] == ANSWER
        await asyncio.wait_for(until_health(200), 30)

        async def until_at_rest() -> None:
            while engine.busy_seconds:
                await asyncio.sleep(0)

        await asyncio.wait_for(until_at_rest(), 30)  # the last token goes out before the step that brought it has ended


async def test_a_thread_that_hangs_does_not_keep_the_server_from_stopping() -> None:
    goes_on = threading.Event()

    def hold(_: ScriptedEngine) -> None:
        goes_on.wait(20)

    engine = AsyncEngine(lambda: ScriptedEngine([tokens_of(ANSWER)], before_step=hold))  # type: ignore[arg-type, return-value]
    await engine.start()
    await engine.wait_ready()
    outputs = engine.generate(Request("r", (1,)))
    reading = asyncio.create_task(anext(outputs))
    await until(lambda: engine.busy_seconds > 0)
    await engine.stop(timeout=0)
    assert (await reading).finish_reason == "abort"
    goes_on.set()


async def test_a_request_that_the_engine_cannot_take_fails_alone() -> None:
    class Choosy(ScriptedEngine):
        def add(self, request: Any) -> None:
            if len(request.prompt_token_ids) > 3:
                raise RuntimeError("secret")
            super().add(request)

    async with served(Choosy([tokens_of(ANSWER)])) as (client, _):
        long, short = await asyncio.gather(
            *(client.post(TEXT, json={"prompt": [1] * count, "max_tokens": 100}) for count in (9, 1))
        )
    assert long.status_code == 500
    assert_internal(long.json())
    assert short.json()["choices"][0]["text"] == ANSWER


async def test_when_the_thread_ends_nobody_waits_and_health_says_so() -> None:
    class Broken(ScriptedEngine):
        def fail_active(self) -> list[Any]:
            raise RuntimeError("slots are lost")

        def step(self) -> list[Any]:
            raise RuntimeError("no memory")

    async with served(Broken([tokens_of(ANSWER)])) as (client, _):
        body = {"prompt": "Hi"}
        assert_internal((await asyncio.wait_for(client.post(TEXT, json=body), 30)).json())
        assert (await client.get("/health")).status_code == 503
        assert (await asyncio.wait_for(client.post(TEXT, json=body), 30)).status_code == 503


async def test_what_nobody_foresaw_is_a_500_with_the_requests_id_and_for_the_page_that_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("secret")

    monkeypatch.setattr("app.routes.completions.requests_for", broken)
    async with served(ScriptedEngine([[]]), cors_origins="https://a.org") as (client, _):
        headers = {"Origin": "https://a.org", "X-Request-ID": "mine"}
        response = await client.post(TEXT, json={"prompt": "Hi"}, headers=headers)
    assert response.status_code == 500
    assert_internal(response.json())
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["access-control-allow-origin"] == "https://a.org"
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]
