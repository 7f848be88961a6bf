"""The bytes of a stream."""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from app import streaming
from app.main import create_app
from app.responses import ChatCompletionChunk, ChunkChoice, Delta
from app.settings import Settings
from speculative.request import Request, RequestOutput
from tests.app.fakes import FakeEngine, chat_body, events, outputs
from tests.app.test_disconnect import Caller

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


async def test_every_byte_of_a_chat_stream(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = ("Hé\n", "", "llo", "")  # a step may add no text, and the last often adds none
    response = await client.post(CHAT, json=chat_body(stream=True))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    first = events(response)[0]
    head = f'"id":"{first["id"]}","object":"chat.completion.chunk","created":{first["created"]},"model":"tiny"'

    def chunk(delta: str, reason: str = "null", tail: str = "") -> str:
        choice = f'"choices":[{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{reason}}}]'
        return f"data: {{{head},{choice}{tail}}}\n\n"

    metrics = json.dumps(events(response)[-1]["metrics"], separators=(",", ":"))
    assert response.content.decode() == (
        chunk('{"role":"assistant","content":""}')
        + chunk('{"content":"Hé\\n"}')
        + chunk('{"content":"llo"}')
        + chunk("{}", '"stop"', f',"metrics":{metrics}')
        + "data: [DONE]\n\n"
    )
    assert json.loads(metrics)["speculative_decoding"]["num_spec_tokens"] == 6


async def test_every_byte_of_a_text_stream(client: httpx.AsyncClient) -> None:
    response = await client.post(TEXT, json={"prompt": "a", "stream": True})
    first = events(response)[0]
    head = f'"id":"{first["id"]}","object":"text_completion","created":{first["created"]},"model":"tiny"'
    metrics = json.dumps(events(response)[-1]["metrics"], separators=(",", ":"))
    choice = '"choices":[{{"index":0,"text":"{}","logprobs":null,"finish_reason":{}}}]'
    assert response.text == "".join(
        f"data: {{{head},{choice.format(text, reason)}{tail}}}\n\n"
        for text, reason, tail in [
            ("Hello", "null", ""),
            (",", "null", ""),
            (" world", "null", ""),
            ("", '"stop"', f',"metrics":{metrics}'),
        ]
    ) + ("data: [DONE]\n\n")


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat_body()), (TEXT, {"prompt": "abc"})])
async def test_usage_comes_last_and_is_null_before(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(await client.post(path, json=body | options))
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (3, 3)
    assert last["metrics"] == chunks[-1]["metrics"]


async def test_without_asking_there_is_no_usage(client: httpx.AsyncClient) -> None:
    chunks = events(await client.post(CHAT, json=chat_body(stream=True, stream_options={"include_usage": False})))
    assert all("usage" not in chunk for chunk in chunks)


async def test_choices_interleave_and_reassemble(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.scripts = [("a", "b", "c"), ("x", "y", "z")]
    chunks = events(await client.post(CHAT, json=chat_body(stream=True, n=2)))
    choices = [chunk["choices"][0] for chunk in chunks]
    for index, text in enumerate(["abc", "xyz"]):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in own) == text
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]
    order = [choice["index"] for choice in choices if choice["delta"].get("content")]
    assert order == [0, 1, 0, 1, 0, 1]
    assert ["metrics" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["metrics"]["speculative_decoding"]["num_target_calls"] == 10


@pytest.mark.parametrize("n", [1, 2])
async def test_an_error_midway_is_an_event_and_done(client: httpx.AsyncClient, engine: FakeEngine, n: int) -> None:
    engine.error = RuntimeError("secret")
    response = await client.post(CHAT, json=chat_body(stream=True, n=n))
    assert response.status_code == 200
    *chunks, last = events(response)
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks if chunk["choices"][0]["index"] == 0] == [
        "",
        "Hello",
        ",",
        " world",
    ]
    assert last == {
        "error": {
            "message": "The server had an error while processing your request.",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }
    assert len(engine.aborted) == n  # the choices that could go on are ended too


@pytest.mark.parametrize("finish", ["error", "abort"])
async def test_a_request_that_the_engine_gives_up_ends_as_an_error(
    client: httpx.AsyncClient, engine: FakeEngine, finish: str
) -> None:
    engine.finish = finish
    assert "error" in events(await client.post(CHAT, json=chat_body(stream=True)))[-1]


ODD = "".join(map(chr, range(0x20))) + "\"\\/\x7f\x80\xa0é\u2028漢\ufffd🙂<script>&'"


async def test_words_are_written_as_pydantic_would_write_the_whole_chunk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = (ODD, *ODD, "\0text\0", "")
    response = await client.post(CHAT, json=chat_body(stream=True, stream_options={"include_usage": True}))
    first = events(response)[0]

    def chunk(text: str) -> bytes:
        choice = ChunkChoice(index=0, delta=Delta(content=text), logprobs=None, finish_reason=None)
        whole = ChatCompletionChunk(
            id=first["id"], object="chat.completion.chunk", created=first["created"], model="tiny", choices=[choice], usage=None
        )
        return f"data: {whole.model_dump_json(exclude_unset=True)}".encode()

    assert response.content.split(b"\n\n")[1:-4] == [chunk(text) for text in engine.script[:-1]]


class SlowCaller(Caller):
    """A client that takes nothing in beyond the response's first event until it is told to."""

    def __init__(self, body: dict[str, Any]) -> None:
        super().__init__(body)
        self.reads, self.full = asyncio.Event(), asyncio.Event()

    async def send(self, message: dict[str, Any]) -> None:
        await super().send(message)
        if message.get("body"):
            self.full.set()
            await self.reads.wait()

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message.get("body")]


@dataclass
class Ending(FakeEngine):
    """Says when its answer has been taken over."""

    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        async for output in super().generate(request):
            yield output
        self.ended.set()


async def test_a_slow_client_gets_waiting_events_together_and_loses_none() -> None:
    engine = Ending(script=[f"{number} " for number in range(100)])
    app = create_app(Settings(), engine)
    caller = SlowCaller(chat_body(stream=True))
    answering = asyncio.create_task(app(caller.scope, caller.receive, caller.send))
    await asyncio.wait_for(caller.full.wait(), 30)
    await asyncio.wait_for(engine.ended.wait(), 30)
    sent_before = len(caller.bodies)
    caller.reads.set()
    await asyncio.wait_for(answering, 30)
    assert len(caller.bodies) <= sent_before + 2
    *told, finish, done, nothing = b"".join(caller.bodies).split(b"\n\n")
    texts = [json.loads(event.removeprefix(b"data: "))["choices"][0]["delta"]["content"] for event in told]
    assert texts == ["", *engine.script]
    assert b'"finish_reason":"stop"' in finish
    assert (done, nothing) == (b"data: [DONE]", b"")


@dataclass
class Hasty(FakeEngine):
    """Has all that it writes at once, and waits for nothing in between."""

    told: int = 0

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        for output in outputs(request, self.script):
            self.told += 1
            yield output


async def test_others_have_their_turns_while_there_is_always_more_to_tell() -> None:
    engine = Hasty(script=["x"] * 3 * streaming.AT_ONCE)
    told: list[int] = []

    class Watching(Caller):
        async def send(self, message: dict[str, Any]) -> None:
            await super().send(message)
            told.append(engine.told)

    caller = Watching(chat_body(stream=True))
    await asyncio.wait_for(create_app(Settings(), engine)(caller.scope, caller.receive, caller.send), 30)
    assert told[1] < len(engine.script)
    assert b"".join(message.get("body", b"") for message in caller.sent).count(b'"content":"x"') == len(engine.script)


async def test_every_chunk_tells_what_all_choices_have_cost_by_then(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.scripts = [("a", "b", "c"), ("x", "y"), ("k",), ("l", "m")]
    options = {"include_usage": True, "continuous_usage_stats": True, "continuous_metrics": True}
    body = {"prompt": ["abc", "de"], "n": 2, "stream": True, "stream_options": options}
    *chunks, last = events(await client.post(TEXT, json=body))
    written = [0] * 4
    for chunk in chunks:
        (choice,) = chunk["choices"]
        written[choice["index"]] += bool(choice["text"])
        begun = [bool(count) for count in written]
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == 5
        assert usage["completion_tokens"] == sum(written)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 2 * begun[0] + 1 * begun[2]
        assert chunk["metrics"]["speculative_decoding"]["num_spec_steps"] % 3 == 0
    assert written == [3, 2, 1, 2]
    assert last["usage"] == chunks[-1]["usage"]
    assert last["metrics"] == chunks[-1]["metrics"]
    assert last["metrics"]["speculative_decoding"]["acceptance_histogram"] == [4, 4, 4]


async def test_a_client_that_leaves_while_it_does_not_read_ends_its_work(app: Any, engine: FakeEngine) -> None:
    engine.hang = True
    caller = SlowCaller(chat_body(stream=True))
    answering = asyncio.create_task(app(caller.scope, caller.receive, caller.send))
    await asyncio.wait_for(caller.full.wait(), 30)
    await asyncio.wait_for(engine.hanging.acquire(), 30)
    caller.gone.set()
    await asyncio.wait_for(answering, 30)
    assert len(engine.aborted) == 1


class ListeningCaller(Caller):
    """A client that leaves after some pings."""

    async def send(self, message: dict[str, Any]) -> None:
        await super().send(message)
        if sum(each.get("body", b"").count(streaming.PING) for each in self.sent) >= 3:
            self.gone.set()


async def test_a_silent_stream_is_kept_open_with_comments(app: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "PING_S", 0.01)
    engine.hang = True
    caller = ListeningCaller(chat_body(stream=True))
    await asyncio.wait_for(app(caller.scope, caller.receive, caller.send), 30)
    assert caller.gone.is_set()
    text = b"".join(message.get("body", b"") for message in caller.sent).decode()
    assert all(event.startswith(("data: {", ": ping")) for event in text.split("\n\n")[:-1])


async def test_what_the_server_cannot_send_is_raised_and_ends_the_work(app: Any, engine: FakeEngine) -> None:
    engine.hang = True
    caller = Caller(chat_body(stream=True))

    async def broken(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            raise OSError("the pipe is broken")

    with pytest.raises(OSError, match="the pipe is broken"):
        await asyncio.wait_for(app(caller.scope, caller.receive, broken), 30)
    assert len(engine.aborted) == 1
