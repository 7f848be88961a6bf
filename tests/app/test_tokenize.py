"""Tokens for those who count them beforehand."""

from typing import Any

import httpx
import pytest

from tests.app.fakes import CONTEXT, FakeEngine


async def test_a_prompts_tokens(client: httpx.AsyncClient) -> None:
    body = (await client.post("/tokenize", json={"prompt": "ab", "model": "tiny"})).json()
    assert body == {"count": 2, "max_model_len": CONTEXT, "tokens": [97, 98], "token_strs": None}


async def test_a_conversations_tokens_are_those_that_a_chat_request_gets(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    conversation = {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"mood": "good"}}
    body = (await client.post("/tokenize", json=conversation | {"return_token_strs": True})).json()
    assert (body["tokens"], body["token_strs"]) == ([72, 105, 0], ["H", "i", "\0"])
    await client.post("/v1/chat/completions", json=conversation)
    assert engine.requests[0].prompt_token_ids == (72, 105, 0)
    assert engine.tokenizer.options[0] == engine.tokenizer.options[1]


async def test_and_back(client: httpx.AsyncClient) -> None:
    assert (await client.post("/detokenize", json={"tokens": [97, 98]})).json() == {"prompt": "ab"}


async def test_far_more_tokens_than_a_context_holds_are_not_put_together(client: httpx.AsyncClient) -> None:
    assert (await client.post("/detokenize", json={"tokens": [97] * 2 * CONTEXT})).status_code == 200
    response = await client.post("/detokenize", json={"tokens": [97] * (2 * CONTEXT + 1)})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "tokens", "context_length_exceeded")
    assert f"maximum context length is {CONTEXT} tokens" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/tokenize", {"prompt": "a", "nonsense": 1}, "nonsense"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {"tokens": [97, 256]}, "tokens"),
        ("/detokenize", {"tokens": "ab"}, "tokens"),
    ],
)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str) -> None:
    response = await client.post(path, json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


CONVERSATION = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
        ({"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ({"prompt": "a", "chat_template_kwargs": {"mood": "good"}}, "chat_template_kwargs"),
        (CONVERSATION | {"add_special_tokens": True}, "add_special_tokens"),
    ],
)
async def test_what_would_be_ignored_is_refused(client: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    error = (await client.post("/tokenize", json=body)).json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert "only allowed with" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "add_special_tokens": False},
        {"prompt": "a", "tools": [], "add_generation_prompt": True, "continue_final_message": False, "chat_template_kwargs": {}},
        {"prompt": "a", "tools": None, "add_generation_prompt": None, "continue_final_message": None, "messages": None},
        CONVERSATION | {"add_special_tokens": False, "prompt": None},
        CONVERSATION | {"add_special_tokens": None, "add_generation_prompt": False},
    ],
)
async def test_what_clients_send_along_without_meaning_it_is_accepted(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    assert (await client.post("/tokenize", json=body)).status_code == 200


async def test_what_clients_need_that_write_prompts_by_themselves(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.tokenizer.eos_token = "</s>"
    told = (await client.get("/tokenizer_info")).json()
    assert told == {"tokenizer_class": "FakeTokenizer", "chat_template": "present", "eos_token": "</s>"} | dict.fromkeys(
        ("bos_token", "pad_token", "unk_token")
    )
    engine.ready = False
    assert (await client.get("/tokenizer_info")).status_code == 503


async def test_the_version(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.ready = False
    assert (await client.get("/version")).json()["version"].count(".") == 2
