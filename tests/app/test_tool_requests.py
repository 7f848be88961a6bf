"""What is asked of tools: what the template and the engine get, and what is refused by name."""

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from app import chat
from app.main import create_app
from app.messages import Message, TemplateOptions
from app.settings import Settings
from app.tools.formats import HERMES, LLAMA3_JSON, tool_format
from app.tools.schemas import Tool
from models.loader import BUNDLED, load_tokenizer
from speculative.errors import ContextLengthError
from tests.app.fakes import FakeEngine, FakeTokenizer, chat_body
from tests.app.test_errors import assert_error
from tests.app.test_tools import CHAT, CLOCK, WEATHER, tool_body


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.tokenizer.chat_template = "… <tool_call> …"
    return engine


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


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


def test_tools_and_calls_count_among_what_is_far_too_long() -> None:
    tokenizer, text = load_tokenizer(BUNDLED["target"]), "some words " * 100
    tool = Tool.model_validate({"type": "function", "function": {"name": "f", "description": text}})
    call = {"id": "a", "function": {"name": "f", "arguments": json.dumps({"words": text})}}
    asked, called = Message(role="user", content="Hi"), Message.model_validate({"role": "assistant", "tool_calls": [call]})
    for messages, tools in (([asked], [tool]), ([asked, called], [])):
        assert len(chat.prompt_tokens(tokenizer, messages, TemplateOptions(), tools, most=1000)) > 100
        with pytest.raises(ContextLengthError, match="maximum context length is 20 tokens") as refused:
            chat.prompt_tokens(tokenizer, messages, TemplateOptions(), tools, most=20)
        assert refused.value.param == "messages"


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
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": None}}, "tool_choice.function", None),
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


@pytest.mark.parametrize(("order", "by_name"), [(None, False), ("schema", False), ("name", True)])
def test_the_tokenizers_configuration_tells_the_order_of_arguments(order: str | None, by_name: bool) -> None:
    tokenizer = FakeTokenizer()
    tokenizer.chat_template = "<tool_call>"
    tokenizer.init_kwargs = {} if order is None else {"tool_argument_order": order}
    assert tool_format("auto", tokenizer) == replace(HERMES, by_name=by_name)
    assert tool_format("llama3_json", tokenizer) == replace(LLAMA3_JSON, by_name=by_name)


async def test_an_order_of_arguments_that_there_is_not_is_refused(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.tokenizer.init_kwargs = {"tool_argument_order": "alphabetical"}
    response = await client.post(CHAT, json=chat_body(tools=[WEATHER]))
    assert_error(response, 400, "tools", response.json()["error"]["code"])
    assert "'alphabetical', which must be 'schema' or 'name'" in response.json()["error"]["message"]


def test_the_bundled_model_has_learnt_arguments_by_name() -> None:
    assert tool_format("auto", load_tokenizer(BUNDLED["target"])) == replace(HERMES, by_name=True)


@pytest.mark.parametrize(("setting", "template"), [("auto", "plain"), ("none", "<tool_call>")])
async def test_tools_of_a_model_that_has_no_format_are_refused(engine: FakeEngine, setting: Any, template: str) -> None:
    engine.tokenizer.chat_template = template
    transport = httpx.ASGITransport(create_app(Settings(tool_call_format=setting), engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        error = assert_error(await client.post(CHAT, json=tool_body()), 400, "tools", "invalid_value")
        assert "--tool-call-format" in error["message"]
        assert (await client.post(CHAT, json=tool_body(tool_choice="none"))).status_code == 200


@pytest.mark.parametrize(
    ("options", "constrained"),
    [
        ({}, False),
        ({"tool_choice": "none"}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": named("clock")}, True),
        ({"parallel_tool_calls": False}, True),
        ({"tools": [{"type": "function", "function": WEATHER["function"] | {"strict": True}}]}, True),
        ({"response_format": {"type": "json_object"}}, True),
    ],
)
async def test_the_engine_follows_a_grammar_where_tools_ask_for_one(
    client: httpx.AsyncClient, engine: FakeEngine, options: dict[str, Any], constrained: bool
) -> None:
    response = await client.post(CHAT, json=tool_body() | options)
    assert response.status_code == 200, response.text
    grammar = engine.requests[0].params.grammar
    assert (grammar is not None and grammar.kind == "llguidance") is constrained
    assert grammar is None or engine.grammars[-1] == grammar


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": "required", "structured_outputs": {"json_object": True}}, "structured_outputs.json_object"),
        ({"tool_choice": named("clock"), "guided_regex": "a+"}, "guided_regex"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ],
)
async def test_what_forced_calls_cannot_go_with(
    client: httpx.AsyncClient, engine: FakeEngine, options: dict[str, Any], param: str
) -> None:
    assert_error(await client.post(CHAT, json=tool_body() | options), 400, param, "invalid_value")
    assert engine.requests == []


@pytest.mark.parametrize(
    ("strict", "choice", "param"),
    [
        (True, "auto", "tools[1].function.parameters"),
        (True, "required", "tools[1].function.parameters"),
        (None, "required", "tools"),
    ],
)
async def test_a_schema_that_cannot_be_followed_is_named(
    client: httpx.AsyncClient, strict: bool | None, choice: str, param: str
) -> None:
    bad = {"name": "x", "parameters": {"properties": {"refuse me": {}}}, "strict": strict}
    body = chat_body(tools=[WEATHER, {"type": "function", "function": bad}], tool_choice=choice)
    assert_error(await client.post(CHAT, json=body), 400, param, "invalid_value")
