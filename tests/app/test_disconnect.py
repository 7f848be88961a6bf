"""A client that goes away ends its work at once. Spoken in raw ASGI, as httpx's in-memory client cannot leave early."""

import asyncio
import json
import logging
import threading
from typing import Any

import pytest

from app.main import create_app
from app.settings import Settings
from speculative.request import Grammar
from tests.app.fakes import FakeEngine, chat_body


class Caller:
    """One request whose client can leave."""

    def __init__(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> None:
        self.gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self._incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }

    async def receive(self) -> dict[str, Any]:
        if self._incoming:
            return self._incoming.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_aborts_every_choice(
    app: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture, stream: bool, n: int
) -> None:
    caplog.set_level(logging.INFO, "moaserve.access")
    engine.hang = True
    caller = Caller(chat_body(stream=stream, n=n))
    answering = asyncio.create_task(app(caller.scope, caller.receive, caller.send))
    for _ in range(n):
        await asyncio.wait_for(engine.hanging.acquire(), 30)
    assert engine.aborted == []
    caller.gone.set()
    await asyncio.wait_for(answering, 30)
    assert sorted(engine.aborted) == sorted(request.request_id for request in engine.requests)
    assert len(engine.aborted) == n
    assert " 499 " in caplog.records[-1].getMessage()
    text = "".join(message.get("body", b"").decode() for message in caller.sent)
    assert "[DONE]" not in text


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_answer_begins_gives_its_place_back(engine: FakeEngine, stream: bool) -> None:
    engine.hang = True
    app = create_app(Settings(max_num_seqs=1, max_queue_requests=0), engine)
    for _ in range(3):
        caller = Caller(chat_body(stream=stream))
        caller.gone.set()
        await asyncio.wait_for(app(caller.scope, caller.receive, caller.send), 30)
        assert not any(message.get("status") == 429 for message in caller.sent)
    engine.hang = False
    caller = Caller(chat_body(stream=stream))
    await asyncio.wait_for(app(caller.scope, caller.receive, caller.send), 30)
    assert caller.sent[0]["status"] == 200


async def test_who_leaves_the_queue_for_compiling_is_not_compiled_for(
    app: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def slow(grammar: Grammar) -> None:
        compiled.append(grammar.source)
        begun.set()
        assert go_on.wait(30)

    monkeypatch.setattr(engine, "check_grammar", slow)
    first, second = Caller(chat_body(guided_regex="a")), Caller(chat_body(guided_regex="b"))
    answering = asyncio.create_task(app(first.scope, first.receive, first.send))
    assert await asyncio.to_thread(begun.wait, 30)
    second.gone.set()
    await asyncio.wait_for(app(second.scope, second.receive, second.send), 30)
    go_on.set()
    await asyncio.wait_for(answering, 30)
    assert compiled == ["a"]
    assert first.sent[0]["status"] == 200


async def test_who_leaves_while_one_prompt_is_tokenized_is_not_tokenized_for_any_more(
    app: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def slow(text: str, **options: Any) -> list[int]:
        encoded.append(text)
        begun.set()
        assert go_on.wait(30)
        return [0]

    monkeypatch.setattr(engine.tokenizer, "encode", slow)
    caller = Caller({"prompt": ["a", "b", "c"]}, "/v1/completions")
    answering = asyncio.create_task(app(caller.scope, caller.receive, caller.send))
    assert await asyncio.to_thread(begun.wait, 30)
    caller.gone.set()
    try:
        await asyncio.wait_for(answering, 20)
    finally:
        go_on.set()
    assert encoded == ["a"]
    assert engine.requests == []


async def test_time_runs_out_in_the_queue_too(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(engine, "check_grammar", lambda grammar: go_on.wait(30))
    caller = Caller(chat_body(guided_regex="a"))
    app = create_app(Settings(request_timeout=0.05), engine)
    answering = asyncio.create_task(app(caller.scope, caller.receive, caller.send))
    while not caller.sent:
        await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait_for(answering, 30)
    assert caller.sent[0]["status"] == 408
    assert engine.requests == []


async def test_cancelling_the_server_task_aborts_too(app: Any, engine: FakeEngine) -> None:
    engine.hang = True
    caller = Caller(chat_body())
    answering = asyncio.create_task(app(caller.scope, caller.receive, caller.send))
    await asyncio.wait_for(engine.hanging.acquire(), 30)
    answering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answering
    await asyncio.sleep(0)
    assert len(engine.aborted) == 1
    assert caller.sent == []


async def test_nobody_is_aborted_when_all_goes_well(app: Any, engine: FakeEngine) -> None:
    caller = Caller(chat_body(n=2, stream=True))
    await asyncio.wait_for(app(caller.scope, caller.receive, caller.send), 30)
    assert engine.aborted == []
    assert caller.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


async def test_the_access_line_tells_how_it_went_but_not_what_was_said(
    app: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    body = chat_body(messages=[{"role": "user", "content": "my secret"}])
    caller = Caller(body)
    await app(caller.scope, caller.receive, caller.send)
    lines = [record.getMessage() for record in caplog.records if record.name == "moaserve.access"]
    assert len(lines) == 1
    assert lines[0].startswith("POST '/v1/chat/completions' 200 ")
    assert "my secret" not in caplog.text
