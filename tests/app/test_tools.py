"""Tools over HTTP: what is refused, what the template gets, and what comes back, whole and streamed."""

import json
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from app import chat
from app.main import create_app
from app.messages import Message, TemplateOptions
from app.settings import Settings
from app.tools.formats import HERMES, LLAMA3_JSON, tool_format
from app.tools.schemas import Tool
from models.loader import BUNDLED, load_tokenizer
from tests.app.fakes import FakeEngine, FakeTokenizer, chat_body, events
from tests.app.test_errors import assert_error

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


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


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


async def test_the_template_gets_the_tools(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    assert (await client.post(CHAT, json=chat_body(tools=[strict, CLOCK]))).status_code == 200
    empty = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
    assert engine.tokenizer.options[0]["tools"] == [WEATHER, empty]
    assert (await client.post("/tokenize", json=chat_body(tools=[CLOCK]))).status_code == 200
    assert engine.tokenizer.options[1]["tools"] == [empty]


def test_the_bundled_models_template_writes_tools_calls_and_results() -> None:
    tokenizer = load_tokenizer(BUNDLED["target"])
    messages = [
        Message(role="user", content="How is the weather in Rome?"),
        Message.model_validate(
            {
                "role": "assistant",
                "tool_calls": [{"id": "a", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}],
            }
        ),
        Message(role="tool", content="sunny", tool_call_id="a"),
    ]
    ids = chat.prompt_tokens(tokenizer, messages, TemplateOptions(), [Tool.model_validate(tool) for tool in (WEATHER, CLOCK)])
    assert tokenizer is not None and tokenizer.decode(ids) == (
        "<|im_start|>system\nTools:\nget_weather(city*) Weather of a city\nclock()<|im_end|>\n"
        "<|im_start|>user\nHow is the weather in Rome?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("extra", "param", "code"),
    [
        ({"tools": {}}, "tools", "invalid_type"),
        ({"tools": [CLOCK] * 129}, "tools", "invalid_value"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type", "invalid_value"),
        ({"tools": [{"function": {"name": "x"}}]}, "tools[0].type", "missing_required_parameter"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
        ({"tools": [CLOCK, {"type": "function", "function": {}}]}, "tools[1].function.name", "missing_required_parameter"),
        ({"tools": [named("")]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [named("a b")]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [named("a\n")]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [named("x" * 65)]}, "tools[0].function.name", "invalid_value"),
        ({"tools": [named(5)]}, "tools[0].function.name", "invalid_type"),
        ({"tools": [CLOCK, WEATHER, CLOCK]}, "tools[2].function.name", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": "{}"}}]}, "tools[0].function.parameters", None),
        (
            {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters.type",
            "invalid_value",
        ),
        ({"tools": [{"type": "function", "function": {"name": "x", "strict": 1}}]}, "tools[0].function.strict", "invalid_type"),
        ({"tools": [CLOCK], "tool_choice": "always"}, "tool_choice", "invalid_value"),
        ({"tools": [CLOCK], "tool_choice": 5}, "tool_choice", "invalid_type"),
        ({"tools": [CLOCK], "tool_choice": {"type": "auto"}}, "tool_choice.type", "invalid_value"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function"}}, "tool_choice.function", "missing_required_parameter"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name", None),
        ({"tools": [CLOCK], "tool_choice": {"function": {"name": "clock"}}}, "tool_choice.type", "missing_required_parameter"),
        ({"tools": [CLOCK], "tool_choice": named("clocks")}, "tool_choice.function.name", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": named("clock")}, "tool_choice", "invalid_value"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [CLOCK], "parallel_tool_calls": "no"}, "parallel_tool_calls", "invalid_type"),
        ({"functions": [{"name": "clock"}]}, "functions", "unsupported_parameter"),
        ({"tools": [CLOCK], "function_call": {"name": "clock"}}, "function_call", "unsupported_parameter"),
        ({"tools": [CLOCK], "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "invalid_value"),
    ],
)
async def test_what_is_wrong_is_named(
    client: httpx.AsyncClient, engine: FakeEngine, extra: dict[str, Any], param: str, code: str | None
) -> None:
    response = await client.post(CHAT, json=chat_body(**extra))
    assert_error(response, 400, param, code or response.json()["error"]["code"])
    assert engine.requests == []


@pytest.mark.parametrize(
    "neutral", [{"tool_choice": "none"}, {"tool_choice": "auto"}, {"tools": []}, {"parallel_tool_calls": False}]
)
async def test_without_tools_there_is_nothing_to_choose(client: httpx.AsyncClient, neutral: dict[str, Any]) -> None:
    assert (await client.post(CHAT, json=chat_body(**neutral))).status_code == 200


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ("{{ '<tool_call>' }}{{ arguments }}", HERMES),
        ({"default": "plain", "tool_use": "<tool_call>"}, HERMES),
        ("<tool_call> <function=", None),  # Qwen3-Coder's XML
        ("<|python_tag|>", LLAMA3_JSON),
        ('ipython {"name": function name, "parameters": …}', LLAMA3_JSON),
        ("plain", None),
        (None, None),
    ],
)
def test_the_template_tells_the_format(template: Any, format: Any) -> None:
    tokenizer = FakeTokenizer()
    tokenizer.chat_template = template
    assert tool_format("auto", tokenizer) is format
    assert (tool_format("hermes", tokenizer), tool_format("none", tokenizer)) == (HERMES, None)


@pytest.mark.parametrize(("setting", "template"), [("auto", "plain"), ("none", "<tool_call>")])
async def test_tools_of_a_model_that_has_no_format_are_refused(engine: FakeEngine, setting: Any, template: str) -> None:
    engine.tokenizer.chat_template = template
    transport = httpx.ASGITransport(create_app(Settings(tool_call_format=setting), engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        error = assert_error(await client.post(CHAT, json=tool_body()), 400, "tools", "invalid_value")
        assert "--tool-call-format" in error["message"]
        assert (await client.post(CHAT, json=tool_body(tool_choice="none"))).status_code == 200


async def test_llamas_calls(engine: FakeEngine) -> None:
    engine.script = ('{"name": "get_weather", "para', 'meters": {"city": "Rome"}}; ', '{"name": "clock", "parameters": {}}')
    transport = httpx.ASGITransport(create_app(Settings(tool_call_format="llama3_json"), engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        (choice,) = (await client.post(CHAT, json=tool_body())).json()["choices"]
    assert [json.loads(call["function"]["arguments"]) for call in choice["message"]["tool_calls"]] == [{"city": "Rome"}, {}]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
