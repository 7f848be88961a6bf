"""Choices among tools that both APIs have: forced ones beside a form of text, and those that allow some of the tools."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from app.tools.formats import HERMES, LLAMA3_JSON, Format
from models.loader import BUNDLED, load_tokenizer
from speculative.grammar import Grammars
from speculative.request import Grammar
from tests.app.asking import URL, body_of, client_of, events_of, text_of
from tests.app.fakes import FakeEngine, chat_body, events
from tests.app.reassembly import reassembled
from tests.app.test_errors import assert_error
from tests.app.test_responses_tools import CLOCK, WEATHER
from tests.app.test_tool_grammar import END, written
from tests.app.test_tools import CHAT

Choice = str | tuple[str, Sequence[str]] | None
TOOLS: list[dict[str, Any]] = [
    WEATHER | {"strict": None},
    CLOCK,
    {"type": "function", "name": "note", "parameters": {"type": "object"}},
]
ROME, TIME = written(HERMES, "get_weather", '{"city": "Rome"}'), written(HERMES, "clock", "{}")
FORCED: list[Choice] = ["required", "clock", ("required", ["clock", "note"])]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SETTINGS = {HERMES: "hermes", LLAMA3_JSON: "llama3_json"}
FORMATS = pytest.mark.parametrize("format", SETTINGS, ids=SETTINGS.values())
APIS = pytest.mark.parametrize("api", ["chat", "responses"])


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine((TIME[:20], TIME[20:]))
    engine.tokenizer.chat_template = "… <tool_call> …"
    return engine


def nested(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool of /v1/responses as chat has it."""
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def choice_in(api: str, choice: Choice) -> Any:
    """A mode, the name of a tool, or a mode and the tools allowed, as the API words it."""
    if isinstance(choice, tuple):
        mode, names = choice
        allowed = {"mode": mode, "tools": [choice_in(api, name) for name in names]}
        return {"type": "allowed_tools"} | ({"allowed_tools": allowed} if api == "chat" else allowed)
    if choice in (None, "none", "auto", "required"):
        return choice
    return nested({"name": choice}) if api == "chat" else {"type": "function", "name": choice}


def form_in(api: str, schema: dict[str, Any] | None) -> dict[str, Any]:
    """The parameter that asks for JSON, which a schema describes if there is one."""
    if schema is None:
        form: dict[str, Any] = {"type": "json_object"}
    elif api == "chat":
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    else:
        form = {"type": "json_schema", "name": "answer", "schema": schema}
    return {"response_format": form} if api == "chat" else {"text": {"format": form}}


async def ask(client: httpx.AsyncClient, api: str, choice: Choice, **extra: Any) -> httpx.Response:
    options = {"tool_choice": choice_in(api, choice), **extra}
    if api == "chat":
        return await client.post(CHAT, json=chat_body(tools=[nested(tool) for tool in TOOLS]) | options)
    return await client.post(URL, json=body_of(tools=TOOLS) | options)


def calls_of(api: str, response: httpx.Response, *, stream: bool = False) -> list[tuple[str, str]]:
    """The names and arguments that were called."""
    assert response.status_code == 200, response.text
    if api == "chat":
        document = reassembled(events(response)) if stream else response.json()
        return [
            (call["function"]["name"], call["function"]["arguments"])
            for call in document["choices"][0]["message"].get("tool_calls", ())
        ]
    document = events_of(response)[-1]["response"] if stream else response.json()
    return [(item["name"], item["arguments"]) for item in document["output"] if item["type"] == "function_call"]


@cache
def bundled() -> tuple[Any, Grammars]:
    """The bundled model's tokenizer, and what follows grammars for it."""
    tokenizer: Any = load_tokenizer(BUNDLED["target"])
    return tokenizer, Grammars(tokenizer, 8192, [END])


def accepts(grammar: Grammar | None, text: str) -> bool:
    """Whether the engine lets the bundled model write the text, and end there."""
    assert grammar is not None
    tokenizer, grammars = bundled()
    matcher = grammars.follow(grammar)
    return all(matcher.accept(token) for token in [*tokenizer.encode(text, add_special_tokens=False), END])


@APIS
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", FORCED, ids=str)
@pytest.mark.parametrize("schema", [None, SCHEMA], ids=["object", "schema"])
async def test_forced_calls_are_the_same_beside_a_form_of_text(
    client: httpx.AsyncClient, engine: FakeEngine, api: str, stream: bool, choice: Choice, schema: dict[str, Any] | None
) -> None:
    plain = await ask(client, api, choice, stream=stream)
    beside = await ask(client, api, choice, stream=stream, **form_in(api, schema))
    called = calls_of(api, beside, stream=stream)
    assert called == calls_of(api, plain, stream=stream) == [("clock", "{}")]
    assert engine.requests[0].params.grammar == engine.requests[1].params.grammar
    assert accepts(engine.requests[1].params.grammar, TIME)
    assert not accepts(engine.requests[1].params.grammar, '{"a": 1}')


@APIS
async def test_the_form_of_text_is_told_back_and_still_one_that_can_be_followed(
    client: httpx.AsyncClient, engine: FakeEngine, api: str
) -> None:
    if api == "responses":
        told = (await ask(client, api, "required", **form_in(api, None))).json()
        assert (told["text"]["format"], told["tool_choice"]) == ({"type": "json_object"}, "required")
        engine.requests.clear()
    param = "response_format" if api == "chat" else "text.format"
    for choice in FORCED:
        bad = await ask(client, api, choice, **form_in(api, {"title": "refuse me"}))
        assert_error(bad, 400, param, "invalid_value")
    assert engine.requests == []


@APIS
@pytest.mark.parametrize("choice", FORCED, ids=str)
@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"guided_json": {}}, "guided_json"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "structured_outputs.grammar"),
    ],
)
async def test_other_forms_do_not_go_with_forced_calls(
    client: httpx.AsyncClient, engine: FakeEngine, api: str, choice: Choice, form: dict[str, Any], param: str
) -> None:
    assert_error(await ask(client, api, choice, **form), 400, param, "invalid_value")
    assert engine.requests == []


@APIS
@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_model_is_told_of_all_tools_and_calls_those_allowed(
    client: httpx.AsyncClient, engine: FakeEngine, api: str, mode: str, stream: bool
) -> None:
    response = await ask(client, api, (mode, ["clock", "note"]), stream=stream)
    assert calls_of(api, response, stream=stream) == [("clock", "{}")]
    assert [tool["function"]["name"] for tool in engine.tokenizer.options[0]["tools"]] == ["get_weather", "clock", "note"]
    grammar = engine.requests[0].params.grammar
    for text in (TIME, TIME + "\n" + written(HERMES, "note", '{"a": 1}')):
        assert accepts(grammar, text), text
    for text in (ROME, TIME + "\n" + ROME, "<tool_call>{", written(HERMES, "unknown", "{}")):
        assert not accepts(grammar, text), text
    for text in ("", "It is late.", "It is late.\n" + TIME):
        assert accepts(grammar, text) is (mode == "auto"), text
    assert not accepts(grammar, "So: " + ROME)


@APIS
async def test_allowed_tools_are_called_once_where_calls_are_not_parallel(
    client: httpx.AsyncClient, engine: FakeEngine, api: str
) -> None:
    for mode in ("auto", "required"):
        assert (await ask(client, api, (mode, ["clock"]), parallel_tool_calls=False)).status_code == 200
    for request in engine.requests:
        assert accepts(request.params.grammar, TIME)
        assert not accepts(request.params.grammar, TIME + "\n" + TIME)
        assert not accepts(request.params.grammar, ROME)


@APIS
async def test_beside_a_form_an_answer_that_may_call_has_the_form_or_calls_of_allowed_tools(
    client: httpx.AsyncClient, engine: FakeEngine, api: str
) -> None:
    assert (await ask(client, api, ("auto", ["clock"]), **form_in(api, SCHEMA))).status_code == 200
    grammar = engine.requests[0].params.grammar
    assert accepts(grammar, '{"a": 1}') and accepts(grammar, TIME)
    for text in (ROME, "It is late."):
        assert not accepts(grammar, text), text


@APIS
@FORMATS
@pytest.mark.parametrize("stream", [False, True])
async def test_where_a_form_lets_another_tools_call_be_written_it_is_text(
    engine: FakeEngine, api: str, format: Format, stream: bool
) -> None:
    allowed, other = written(format, "clock", "{}"), written(format, "get_weather", '{"city": "Rome"}')
    engine.scripts = [(allowed,), (other[:9], other[9:])]
    async with client_of(engine, tool_call_format=SETTINGS[format]) as client:
        called, said = [await ask(client, api, ("auto", ["clock"]), guided_regex=r"[\s\S]*", stream=stream) for _ in engine.scripts]
    assert calls_of(api, called, stream=stream) == [("clock", "{}")]
    assert calls_of(api, said, stream=stream) == []
    if api == "chat":
        document = reassembled(events(said)) if stream else said.json()
        assert document["choices"][0]["message"]["content"] == other
        assert document["choices"][0]["finish_reason"] == "stop"
    else:
        assert text_of(events_of(said)[-1]["response"] if stream else said.json()) == other


@FORMATS
@pytest.mark.parametrize("choice", [("auto", ["clock"]), ("required", ["clock"])], ids=str)
async def test_other_tools_cannot_be_called_in_any_format(engine: FakeEngine, format: Format, choice: Choice) -> None:
    async with client_of(engine, tool_call_format=SETTINGS[format]) as client:
        assert (await ask(client, "chat", choice)).status_code == 200
    grammar = engine.requests[0].params.grammar
    assert accepts(grammar, written(format, "clock", "{}"))
    assert not accepts(grammar, written(format, "get_weather", '{"city": "Rome"}'))


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_the_allowed_tools_are_told_back(client: httpx.AsyncClient, mode: str) -> None:
    choice = choice_in("responses", (mode, ["note", "clock"]))
    document = (await ask(client, "responses", (mode, ["note", "clock"]))).json()
    assert document["tool_choice"] == choice
    assert (await client.get(f"{URL}/{document['id']}")).json()["tool_choice"] == choice
    streamed = events_of(await ask(client, "responses", (mode, ["note", "clock"]), stream=True))
    told = [event["response"]["tool_choice"] for event in streamed if "response" in event]
    assert len(told) >= 2 and all(each == choice for each in told)
    assert [tool["name"] for tool in document["tools"]] == ["get_weather", "clock", "note"]


async def test_openais_client_allows_tools(client: httpx.AsyncClient) -> None:
    flat: Any = choice_in("responses", ("auto", ["clock"]))
    deep: Any = choice_in("chat", ("auto", ["clock"]))
    tools: Any = TOOLS
    async with AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=client) as openai:
        response = await openai.responses.create(model="tiny", input="Hi", tools=tools, tool_choice=flat)
        answer = await openai.chat.completions.create(**chat_body(tools=[nested(tool) for tool in TOOLS], tool_choice=deep))
    told: Any = response.tool_choice
    assert (told.type, told.mode, told.tools) == ("allowed_tools", "auto", flat["tools"])
    assert answer.choices[0].finish_reason == "tool_calls"


@APIS
@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"mode": "none"}, "mode", "invalid_value"),
        ({"mode": None}, "mode", "invalid_value"),
        ({"tools": []}, "tools", "invalid_value"),
        ({"tools": {}}, "tools", "invalid_type"),
        ({"tools": ["clock"] * 129}, "tools", "invalid_value"),
        ({"tools": ["clock", "clocks"]}, "tools[1].name", "invalid_value"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
        ({"tools": ["clock"], "strict": True}, "strict", "unknown_parameter"),
    ],
)
async def test_what_is_wrong_with_allowed_tools_is_named(
    client: httpx.AsyncClient, engine: FakeEngine, api: str, change: dict[str, Any], param: str, code: str
) -> None:
    allowed: dict[str, Any] = {"mode": "auto", "tools": ["clock"]} | change
    if isinstance(allowed["tools"], list):
        allowed["tools"] = [choice_in(api, tool) if isinstance(tool, str) else tool for tool in allowed["tools"]]
    if api == "responses":
        options = {"tool_choice": {"type": "allowed_tools"} | allowed}
        path = f"tool_choice.{param}"
    else:
        options = {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
        missing = code == "missing_required_parameter"
        path = "tool_choice.allowed_tools." + param.replace("].name", "].function" if missing else "].function.name")
    assert_error(await ask(client, api, None, **options), 400, path, code)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("choice", "param", "code"),
    [
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools", "missing_required_parameter"),
        ({"type": "allowed_tools", "allowed_tools": None}, "tool_choice.allowed_tools", "missing_required_parameter"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "tool_choice.mode", "unknown_parameter"),
        (choice_in("chat", "clock") | choice_in("chat", ("auto", ["clock"])), "tool_choice.function", "invalid_value"),
        (choice_in("chat", ("auto", ["clock"])) | choice_in("chat", "clock"), "tool_choice.allowed_tools", "invalid_value"),
    ],
)
async def test_a_choice_has_what_its_type_needs(client: httpx.AsyncClient, choice: Any, param: str, code: str) -> None:
    assert_error(await ask(client, "chat", None, tool_choice=choice), 400, param, code)


@APIS
@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("tools", [[], None])
async def test_without_tools_none_can_be_allowed(client: httpx.AsyncClient, api: str, mode: str, tools: Any) -> None:
    assert_error(await ask(client, api, (mode, ["clock"]), tools=tools), 400, "tool_choice", "invalid_value")


async def test_the_description_knows_allowed_tools(client: httpx.AsyncClient) -> None:
    schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    described = {name: schemas[name]["properties"] for name in ("AllowedTools", "AllowedChoice", "ToolChoice")}
    for name in ("AllowedTools", "AllowedChoice"):
        assert described[name]["mode"]["enum"] == ["auto", "required"]
        assert described[name]["tools"]["minItems"] == 1
    assert "allowed_tools" in described["ToolChoice"]["type"]["enum"]
    for request, choice in (("ChatCompletionRequest", "ToolChoice"), ("ResponseRequest", "AllowedChoice")):
        assert f"#/components/schemas/{choice}" in str(schemas[request]["properties"]["tool_choice"])
