"""The bytes of a stream."""

import json
from typing import Any

import httpx
import pytest

from tests.app.fakes import FakeEngine, chat_body, events

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
