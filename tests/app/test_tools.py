"""Answers with tool calls, whole and streamed."""

import json
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from app.main import create_app
from app.settings import Settings
from tests.app.fakes import FakeEngine, chat_body, events

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALLS = (
    "Let me ",
    "see.",
    "\n<tool_",
    'call>\n{"name": "get_weather", "argu',
    'ments": {"ci',
    'ty": "Rome"}}\n</tool_call>\n<tool_call>\n{"name": "clock", "arguments": {}}',
    "\n</tool_call>",
    "",
)


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine(CALLS)
    engine.tokenizer.chat_template = "… <tool_call> …"
    return engine


def tool_body(**extra: Any) -> dict[str, Any]:
    return chat_body(tools=[WEATHER, CLOCK], **extra)


async def test_calls_come_back_as_openai_words_them(client: httpx.AsyncClient) -> None:
    body = (await client.post(CHAT, json=tool_body())).json()
    (choice,) = body["choices"]
    ids = [call.pop("id") for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 2 and all(one.startswith("call_") for one in ids)
    assert choice["message"] == {
        "role": "assistant",
        "content": "Let me see.",
        "refusal": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}},
            {"type": "function", "function": {"name": "clock", "arguments": "{}"}},
        ],
    }
    assert choice["finish_reason"] == "tool_calls"
    assert body["usage"]["completion_tokens"] == len(CALLS)


async def test_content_is_null_beside_calls_only(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = CALLS[2:]
    assert (await client.post(CHAT, json=tool_body())).json()["choices"][0]["message"]["content"] is None
    engine.script = ("", "")
    message = (await client.post(CHAT, json=tool_body())).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "", "refusal": None}


async def test_every_delta_of_a_stream_with_calls(client: httpx.AsyncClient) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(await client.post(CHAT, json=tool_body(**options)))
    choices = [chunk["choices"][0] for chunk in chunks]
    deltas = [choice["delta"] for choice in choices]
    first, second = deltas[4]["tool_calls"][0].pop("id", None), deltas[4]["tool_calls"][1].pop("id", None)
    assert first is None and second.startswith("call_")
    assert deltas[3]["tool_calls"][0].pop("id").startswith("call_")
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "Let me"},
        {"content": " see."},
        {"tool_calls": [{"index": 0, "type": "function", "function": {"name": "get_weather", "arguments": '{"ci'}}]},
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": 'ty": "Rome"}'}},
                {"index": 1, "type": "function", "function": {"name": "clock", "arguments": "{}"}},
            ]
        },
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None] * 5 + ["tool_calls"]
    assert last["usage"]["completion_tokens"] == len(CALLS)


async def test_withheld_text_costs_no_log_probabilities(client: httpx.AsyncClient) -> None:
    whole = (await client.post(CHAT, json=tool_body(logprobs=True, top_logprobs=2))).json()["choices"][0]
    chunks = events(await client.post(CHAT, json=tool_body(logprobs=True, top_logprobs=2, stream=True)))
    told = [each for chunk in chunks for each in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert told == whole["logprobs"]["content"]
    assert len(told) == len(CALLS)


async def test_openais_client_puts_streams_together_as_the_whole_answer(client: httpx.AsyncClient) -> None:
    async with AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=client) as openai:
        async with openai.chat.completions.stream(**tool_body(n=2)) as stream:
            streamed = await stream.get_final_completion()
        whole = await openai.chat.completions.create(**tool_body(n=2))
    for one, other in zip(streamed.choices, whole.choices, strict=True):
        assert one.finish_reason == other.finish_reason == "tool_calls"
        assert one.message.content == other.message.content == "Let me see."
        calls = [[(call.function.name, call.function.arguments) for call in each.message.tool_calls] for each in (one, other)]
        assert calls[0] == calls[1] == [("get_weather", '{"city": "Rome"}'), ("clock", "{}")]


@pytest.mark.parametrize("stream", [False, True])
async def test_text_that_only_begins_a_call_is_content(client: httpx.AsyncClient, engine: FakeEngine, stream: bool) -> None:
    engine.script, engine.finish = ("Hi \n<tool", '_call>{"name": "clock", "'), "length"
    response = await client.post(CHAT, json=tool_body(stream=stream))
    choices = [chunk["choices"][0] for chunk in events(response)] if stream else response.json()["choices"]
    messages = [choice["delta"] if stream else choice["message"] for choice in choices]
    assert "".join(message.get("content", "") for message in messages) == "".join(engine.script)
    assert not any("tool_calls" in message for message in messages)
    assert choices[-1]["finish_reason"] == "length"


async def test_a_call_that_was_cut_off_ends_with_length(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script, engine.finish = CALLS[2:5], "length"
    (choice,) = (await client.post(CHAT, json=tool_body())).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"ci'}
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("options", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
async def test_where_no_tool_may_be_called_text_is_text(
    client: httpx.AsyncClient, engine: FakeEngine, options: dict[str, Any]
) -> None:
    (choice,) = (await client.post(CHAT, json=chat_body(**options))).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("".join(CALLS), "stop")
    assert "tools" not in engine.tokenizer.options[0]


async def test_llamas_calls(engine: FakeEngine) -> None:
    engine.script = ('{"name": "get_weather", "para', 'meters": {"city": "Rome"}}; ', '{"name": "clock", "parameters": {}}')
    transport = httpx.ASGITransport(create_app(Settings(tool_call_format="llama3_json"), engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        (choice,) = (await client.post(CHAT, json=tool_body())).json()["choices"]
    assert [json.loads(call["function"]["arguments"]) for call in choice["message"]["tool_calls"]] == [{"city": "Rome"}, {}]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
