"""Text completions: prompts in all their forms."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from app.main import create_app
from app.settings import Settings
from tests.app.fakes import CONTEXT, FakeEngine, events

TEXT = "/v1/completions"


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", [(97, 98)]),
        (["ab", "c"], [(97, 98), (99,)]),
        ([1, 2, 3], [(1, 2, 3)]),
        ([[1], [255, 0]], [(1,), (255, 0)]),
    ],
)
async def test_prompts(client: httpx.AsyncClient, engine: FakeEngine, prompt: Any, tokens: list[tuple[int, ...]]) -> None:
    body = (await client.post(TEXT, json={"model": "tiny", "prompt": prompt})).json()
    assert [request.prompt_token_ids for request in engine.requests] == tokens
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (index, "Hello, world") for index in range(len(tokens))
    ]
    assert body["usage"]["prompt_tokens"] == sum(map(len, tokens))
    assert (body["object"], body["id"][:5]) == ("text_completion", "cmpl-")


@pytest.mark.parametrize("stream", [False, True])
async def test_each_prompt_has_n_choices_in_openais_order(client: httpx.AsyncClient, engine: FakeEngine, stream: bool) -> None:
    engine.scripts = [("p0c0",), ("p0c1",), ("p1c0",), ("p1c1",)]
    options = {"stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
    response = await client.post(TEXT, json={"prompt": ["ab", "c"], "n": 2, "seed": 5, **options})
    documents = events(response) if stream else [response.json()]
    texts = {choice["index"]: choice["text"] for one in documents for choice in one["choices"] if choice["text"]}
    assert texts == {0: "p0c0", 1: "p0c1", 2: "p1c0", 3: "p1c1"}
    assert [request.params.seed for request in engine.requests] == [5, 6, 5, 6]  # as if each prompt were sent alone
    usage = documents[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 4, 7)


@pytest.mark.parametrize(("length", "limit"), [(3, 16), (CONTEXT - 5, 5)])
async def test_openais_default_limit_gives_way_to_the_context(
    client: httpx.AsyncClient, engine: FakeEngine, length: int, limit: int
) -> None:
    assert (await client.post(TEXT, json={"prompt": [1] * length})).status_code == 200
    assert engine.requests[0].params.max_tokens == limit


async def test_a_prompt_that_fills_the_context_is_refused(client: httpx.AsyncClient) -> None:
    response = await client.post(TEXT, json={"prompt": [1] * CONTEXT})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_texts_go_on_where_they_are_asked_to(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "I say"}]
    await client.post(TEXT, json={"prompt": "I say"})
    for continues in (False, True):
        await client.post("/v1/chat/completions", json={"messages": messages, "continue_final_message": continues})
        await client.post("/v1/responses", json={"input": messages, "continue_final_message": continues})
    assert [request.continues for request in engine.requests] == [True, False, False, True, True]


def _watched(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, held: Callable[[str], None] = lambda text: None) -> list[str]:
    """What is tokenized from now on, in order; each text is ``held`` up before."""
    encoded: list[str] = []
    encode = engine.tokenizer.encode

    def watched(text: str, **options: Any) -> list[int]:
        encoded.append(text)
        held(text)
        return encode(text, **options)

    monkeypatch.setattr(engine.tokenizer, "encode", watched)
    return encoded


async def test_more_texts_than_there_is_room_for_are_refused_before_any_is_tokenized(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = _watched(engine, monkeypatch)
    app = create_app(Settings(max_num_seqs=1, max_queue_requests=2), engine)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for body in ({"prompt": ["a"] * 4}, {"prompt": ["a"] * 2, "n": 2}, {"prompt": ["a"], "best_of": 4}):
            response = await client.post(TEXT, json=body)
            assert response.status_code == 400
            message = response.json()["error"]["message"]
            assert message == "This server takes 3 texts at a time, and this request asks for 4."
        assert encoded == []
        assert (await client.post(TEXT, json={"prompt": ["a"] * 3})).status_code == 200


async def test_others_are_tokenized_for_between_two_prompts(
    app: Any, client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def held(text: str) -> None:
        if text == "first":
            begun.set()
            assert go_on.wait(30)

    encoded = _watched(engine, monkeypatch, held)
    many = asyncio.create_task(client.post(TEXT, json={"prompt": ["first", "second", "third"], "echo": True}))
    assert await asyncio.to_thread(begun.wait, 30)
    other = asyncio.create_task(client.post(TEXT, json={"prompt": "other"}))
    try:
        while not app.state.serving.tokenizing.statistics().tasks_waiting:
            await asyncio.sleep(0)
    finally:
        go_on.set()
    assert (await asyncio.wait_for(other, 30)).status_code == 200
    choices = (await asyncio.wait_for(many, 30)).json()["choices"]
    assert encoded == ["first", "other", "second", "third"]
    assert [choice["text"] for choice in choices] == [f"{prompt}Hello, world" for prompt in ("first", "second", "third")]
