"""`return_token_origins`: whose each token is, with texts that are the answer's, however many tokens a step gives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from tests.app.fakes import chat_body, events
from tests.app.reassembly import reassembled, without_times
from tests.app.scripted import ScriptedEngine, served, tokens_of
from tests.app.test_replay import CASES, CHAT, MANY_BYTES, STEPS, TEXT, TOOLS, Case, chat

ASKED = {"return_token_origins": True}
TEXTS = {name: case for name, case in CASES.items() if "tools" not in case.body}


async def answers(case: Case, steps: int, **extra: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer and the stream's chunks."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with served(ScriptedEngine(case.written, steps)) as (client, _):
        whole = (await client.post(case.path, json=case.body | extra)).json()
    async with served(ScriptedEngine(case.written, steps)) as (client, _):
        return whole, events(await client.post(case.path, json=case.body | options | extra))


def merged(chunks: Iterable[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """A stream's origins put together as the documentation says: pieces with the same index are of one token."""
    choices: dict[int, dict[int, dict[str, Any]]] = {}
    for part in (part for chunk in chunks for part in chunk["choices"]):
        tokens = choices.setdefault(part["index"], {})
        for piece in part.get("token_origins", ()):
            token = tokens.setdefault(piece["index"], piece | {"text": ""})
            assert token["origin"] == piece["origin"]
            token["text"] += piece["text"]
    return {index: list(tokens.values()) for index, tokens in choices.items()}


def content(part: dict[str, Any]) -> str:
    text: str = part["text"] if "text" in part else (part.get("delta") or part.get("message") or {}).get("content") or ""
    return text


@pytest.mark.parametrize("name", TEXTS)
async def test_the_texts_of_tokens_are_the_answer_whatever_its_steps(name: str) -> None:
    case = TEXTS[name]
    echoed = case.body["prompt"] if case.body.get("echo") else ""
    texts = []
    for steps in STEPS:
        whole, chunks = await answers(case, steps, **ASKED)
        for part in (part for chunk in chunks for part in chunk["choices"] if "token_origins" in part):
            assert "".join(piece["text"] for piece in part["token_origins"]) == content(part)
        told = [choice["token_origins"] for choice in whole["choices"]]
        assert merged(chunks) == dict(enumerate(told))
        for choice, tokens in zip(whole["choices"], told, strict=True):
            assert echoed + "".join(token["text"] for token in tokens) == content(choice)
            assert [token["index"] for token in tokens] == list(range(len(tokens)))
            # The script drafts all of a step's tokens but the last.
            assert [token["origin"] == "target" for token in tokens] == [place % steps == steps - 1 for place in range(len(tokens))]
        assert sum(map(len, told)) == whole["usage"]["completion_tokens"]
        texts.append([[token["text"] for token in tokens] for tokens in told])
    assert texts == texts[:1] * len(STEPS)  # a token's text is its own, in whatever chunk it comes


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("steps", [1, 3, 8])
async def test_asking_changes_nothing_else(name: str, steps: int) -> None:
    whole, chunks = await answers(TEXTS[name], steps)
    told, told_chunks = await answers(TEXTS[name], steps, **ASKED)
    for choice in told["choices"]:
        del choice["token_origins"]
    assert without_times(told) == without_times(whole)
    assert reassembled(told_chunks) == reassembled(chunks)


async def test_what_is_held_back_comes_with_the_token_that_it_is_of() -> None:
    written = tokens_of("Two tables for five")
    assert [ScriptedEngine.tokenizer.decode([token]) for token in written[:3]] == ["Two", " tables", " for"]
    async with served(ScriptedEngine([written])) as (client, _):
        chunks = events(await client.post(CHAT, json=chat(stream=True, stop=" tables for six", **ASKED)))
    told = [chunk["choices"][0]["token_origins"] for chunk in chunks if "token_origins" in chunk["choices"][0]]
    own = {"origin": "target"}
    assert told[:4] == [
        [{"index": 0, "text": "Two", **own}],
        [{"index": 1, "text": "", **own}],
        [{"index": 2, "text": "", **own}],
        [{"index": 1, "text": " tables", **own}, {"index": 2, "text": " for", **own}, {"index": 3, "text": " five", **own}],
    ]


async def test_a_character_is_of_the_token_that_completes_it() -> None:
    async with served(ScriptedEngine([tokens_of(MANY_BYTES)], 2)) as (client, _):
        whole = (await client.post(CHAT, json=chat(**ASKED))).json()
    texts = [token["text"] for token in whole["choices"][0]["token_origins"]]
    assert "🙂" in texts and "" in texts
    assert not any("\ufffd" in text for text in texts)


async def test_without_a_drafter_all_tokens_are_the_targets(client: httpx.AsyncClient) -> None:
    told = (await client.post(CHAT, json=chat_body(**ASKED))).json()["choices"][0]["token_origins"]
    assert [(token["index"], token["origin"]) for token in told] == [(place, "target") for place in range(3)]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("asked", [{}, {"return_token_origins": False}, {"return_token_origins": None}])
async def test_they_are_told_only_where_asked_for(client: httpx.AsyncClient, path: str, asked: dict[str, Any]) -> None:
    body = {"prompt": "Hi"} if path == TEXT else chat_body()
    assert "token_origins" not in (await client.post(path, json=body | asked)).text
    assert "token_origins" not in (await client.post(path, json=body | asked | {"stream": True})).text


@pytest.mark.parametrize("stream", [True, False])
async def test_where_tools_may_be_called_they_are_refused(client: httpx.AsyncClient, stream: bool) -> None:
    response = await client.post(CHAT, json=chat_body(stream=stream, **TOOLS, **ASKED))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "return_token_origins"
    none = await client.post(CHAT, json=chat_body(stream=stream, **TOOLS, **ASKED, tool_choice="none"))
    assert "token_origins" in none.text


async def test_responses_refuse_them(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/responses", json={"input": "Hi", **ASKED})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "return_token_origins"


@pytest.mark.parametrize("steps", STEPS)
async def test_metrics_so_far_grow_with_what_has_come(steps: int) -> None:
    options = {"stream": True, "stream_options": {"continuous_metrics": True}}
    async with served(ScriptedEngine([tokens_of(MANY_BYTES)], steps)) as (client, _):
        chunks = events(await client.post(CHAT, json=chat(**options)))
    told = [chunk["metrics"]["speculative_decoding"] for chunk in chunks]
    calls = [each["num_target_calls"] for each in told]
    assert calls == sorted(calls) and calls[0] == 1
    assert told[-1]["num_target_calls"] == -(-(len(tokens_of(MANY_BYTES)) + 1) // steps)
    assert all(chunk["choices"] for chunk in chunks)  # no chunk is added for them
