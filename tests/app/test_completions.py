"""Text completions: prompts in all their forms."""

from typing import Any

import httpx
import pytest

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
