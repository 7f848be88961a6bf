"""Tools in /v1/responses: flat as OpenAI has them there, and calls as items of the output."""

import json
from random import Random
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response

from app.tools.formats import HERMES, LLAMA3_JSON, Format
from app.tools.parsing import ToolParser
from app.tools.pieces import Pieces
from tests.app.asking import URL, body_of, created, events_of
from tests.app.fakes import FakeEngine
from tests.app.test_errors import assert_error

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "description": "Weather of a city", "parameters": SCHEMA, "strict": True}
CLOCK = {"type": "function", "name": "clock"}
ANSWER = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\nNow wait.'
)


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine((ANSWER,))
    engine.tokenizer.chat_template = "… <tool_call> …"
    return engine


def tool_body(**extra: Any) -> dict[str, Any]:
    return body_of(tools=[WEATHER, CLOCK], **extra)


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in output]


def call_of(name: str, arguments: str, status: str = "completed") -> dict[str, Any]:
    return {"type": "function_call", "status": status, "name": name, "arguments": arguments}


def message_of(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "status": "completed", "role": "assistant", "content": [part]}


def deep(levels: int) -> dict[str, Any]:
    return {"not": deep(levels - 1)} if levels else {}


async def test_calls_are_items_in_the_order_in_which_they_were_written(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    document = await created(client, tools=[WEATHER, CLOCK], tool_choice="auto", parallel_tool_calls=True)
    assert without_ids(document["output"]) == [
        message_of("Let me see."),
        call_of("get_weather", '{"city": "Rome"}'),
        call_of("clock", "{}"),
        message_of("\nNow wait."),
    ]
    number = document["id"].removeprefix("resp_")
    assert [item["id"] for item in document["output"]] == [
        f"{kind}_{number}_{i}" for i, kind in enumerate(["msg", "fc", "fc", "msg"])
    ]
    assert document["tools"] == [WEATHER, CLOCK | {"description": None, "parameters": None, "strict": None}]
    assert engine.tokenizer.options[0]["tools"][0]["function"]["name"] == "get_weather"


async def test_functions_of_a_namespace_are_called_by_both_names(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = ('<tool_call>\n{"name": "mcp__home__clock", "arguments": {}}\n</tool_call>',)
    home = {"type": "namespace", "name": "mcp__home", "description": "At home", "tools": [CLOCK, {"type": "web_search"}]}
    whole = await created(client, tools=[WEATHER, home])
    assert whole["tools"][1] == home | {"tools": [whole["tools"][1]["tools"][0]]}
    assert Response.model_validate(whole).tools[1].name == "mcp__home"  # type: ignore[union-attr]
    (call,) = whole["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "mcp__home", "clock")
    events = events_of(await client.post(URL, json=body_of(tools=[WEATHER, home], stream=True)))
    assert without_ids(events[-1]["response"]["output"]) == without_ids(whole["output"])
    assert [event["name"] for event in events if event["type"] == "response.function_call_arguments.done"] == ["clock"]

    told = {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}
    ways = ({"input": [{"role": "user", "content": "Hi"}, call, told]}, {"input": [told], "previous_response_id": whole["id"]})
    for way in ways:
        again = await created(client, tools=[WEATHER, home], **way)
        said = engine.tokenizer.conversations[-1][1]
        assert [each["function"]["name"] for each in said["tool_calls"]] == ["mcp__home__clock"]
        listed = (await client.get(f"{URL}/{again['id']}/input_items?order=asc")).json()["data"]
        assert [item.get("namespace") for item in listed] == [None, "mcp__home", None]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "namespace", "name": "a b", "tools": [CLOCK]}], "tools[0].name"),
        ([CLOCK, {"type": "namespace", "name": "n" * 60, "tools": [CLOCK]}], "tools[1].tools[0].name"),
        ([{"type": "namespace", "name": "n", "tools": []}], "tools[0].tools"),
        ([{"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]}], "tools[0].tools[0].type"),
        ([{"type": "namespace", "name": "n", "tools": [CLOCK]}, {"type": "function", "name": "n__clock"}], "tools[1].name"),
        ([{"type": "namespace", "name": f"n{n}", "tools": [CLOCK, WEATHER]} for n in range(65)], "tools"),
    ],
)
async def test_what_is_wrong_with_a_namespace_is_named(
    client: httpx.AsyncClient, engine: FakeEngine, tools: list[dict[str, Any]], param: str
) -> None:
    assert_error(await client.post(URL, json=body_of(tools=tools)), 400, param, "invalid_value")
    assert engine.requests == []


async def test_tools_of_others_are_left_out_beside_functions(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    others = [{"type": "web_search", "external_web_access": False}, {"type": "custom", "name": "apply_patch"}]
    whole = await created(client, tools=[others[0], WEATHER, others[1]])
    assert [tool["name"] for tool in whole["tools"]] == [WEATHER["name"]]
    await created(client, tools=[WEATHER])
    assert engine.tokenizer.conversations[0] == engine.tokenizer.conversations[1]
    for tools, place in ((others, 0), ([WEATHER, {"type": "wizardry"}], 1)):
        assert_error(await client.post(URL, json=body_of(tools=tools)), 400, f"tools[{place}].type", "invalid_value")


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
async def test_events_are_the_same_output_however_many_tokens_a_step_has(
    client: httpx.AsyncClient, engine: FakeEngine, size: int
) -> None:
    whole = await created(client, tools=[WEATHER, CLOCK])
    engine.script = [*(ANSWER[start : start + size] for start in range(0, len(ANSWER), size)), ""]
    events = events_of(await client.post(URL, json=tool_body(stream=True)))
    final = events[-1]["response"]
    assert without_ids(final["output"]) == without_ids(whole["output"])
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == final["output"]
    begun = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    assert begun == [0, 1, 2, 3]
    for index, item in enumerate(final["output"]):
        own = [event for event in events if event.get("output_index") == index]
        assert all(event.get("item_id", item["id"]) == item["id"] for event in own)
        text = "".join(event.get("delta", "") for event in own)
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    done = [event["name"] for event in events if event["type"] == "response.function_call_arguments.done"]
    assert done == [item["name"] for item in final["output"] if item["type"] == "function_call"]
    one_call = [event["type"] for event in events if event.get("output_index") == 1]
    assert one_call[0] == "response.output_item.added"
    assert set(one_call[1:-2]) == {"response.function_call_arguments.delta"}
    assert one_call[-2:] == ["response.function_call_arguments.done", "response.output_item.done"]


@pytest.mark.parametrize("format", [HERMES, LLAMA3_JSON], ids=["hermes", "llama"])
def test_pieces_do_not_depend_on_how_text_is_cut(format: Format) -> None:
    random = Random(0)
    words = ["<tool_call>", "</tool_call>", "<|python_tag|>", '{"name": "f", "arguments": {', '"a": "b"', "}", "}}", "{", "<", ";"]
    words += [
        " x",
        "\n",
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
        '<|python_tag|>{"name": "f", "parameters": {}}',
        "1] is done",
        '{"arguments": {}, "name": "f" oops',
    ]

    def pieces(text: str, size: int) -> list[Any]:
        splitter, found = Pieces(ToolParser(format, {"f"})), []
        for start in range(0, len(text), size):
            found += splitter.feed(text[start : start + size], final=False)
        found += splitter.feed("", final=True)
        joined: list[Any] = []
        for piece in found:
            kind, content = ("text", piece) if isinstance(piece, str) else (piece.index, piece.arguments)
            if joined and joined[-1][0] == kind:
                joined[-1] = (kind, joined[-1][1] + content)
            else:
                joined.append((kind, content))
        return joined

    several = 0
    for _ in range(1000):
        text = "".join(random.choices(words, k=random.randint(1, 16)))
        by_the_character = pieces(text, 1)
        several += len(by_the_character) > 2
        for size in (2, 5, 11, 1000):
            assert pieces(text, size) == by_the_character, text
    assert several > 50


async def test_a_call_whose_arguments_end_wrongly_is_told_before_what_follows(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.script = ('<tool_call>{"name": "clock", "arguments": {"a": 1] is done',)
    document = await created(client, tools=[CLOCK])
    assert without_ids(document["output"]) == [call_of("clock", '{"a": 1]'), message_of("is done")]


async def test_a_call_that_is_cut_off_is_incomplete(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script, engine.finish = (ANSWER[:70],), "length"
    document = await created(client, tools=[WEATHER])
    assert document["status"] == "incomplete"
    assert without_ids(document["output"]) == [
        message_of("Let me see."),
        call_of("get_weather", '{"city": ', "incomplete"),
    ]


async def test_what_a_function_gave_goes_on_the_conversation(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    engine.script = (ANSWER[: ANSWER.index("\nNow")],)
    first = await created(client, tools=[WEATHER, CLOCK])
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "fine"} for call in calls]
    await created(client, tools=[WEATHER, CLOCK], input=results, previous_response_id=first["id"])
    await created(client, tools=[WEATHER, CLOCK], input=[{"role": "user", "content": "Hi"}, *first["output"], *results])
    said = {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [
            {
                "id": call["call_id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": json.loads(call["arguments"])},
            }
            for call in calls
        ],
    }
    gave = [{"role": "tool", "content": "fine", "tool_call_id": call["call_id"]} for call in calls]
    assert engine.tokenizer.conversations[1:] == [[{"role": "user", "content": "Hi"}, said, *gave]] * 2


async def test_where_no_tool_may_be_called_all_is_text(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    document = await created(client, tools=[WEATHER], tool_choice="none")
    assert without_ids(document["output"]) == [message_of(ANSWER)]
    assert "tools" not in engine.tokenizer.options[0]
    assert document["tool_choice"] == "none"


@pytest.mark.parametrize("choice", ["auto", {"type": "function", "name": "clock"}])
async def test_the_choice_is_told_back(client: httpx.AsyncClient, choice: Any) -> None:
    document = await created(client, tools=[CLOCK], tool_choice=choice, parallel_tool_calls=False)
    assert (document["tool_choice"], document["parallel_tool_calls"]) == (choice, False)


async def test_calls_follow_a_grammar_unless_their_tools_are_not_strict(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    loose = {**WEATHER, "strict": False}
    for tools, choice in (
        ([loose], "auto"),
        ([loose], "required"),
        ([WEATHER, CLOCK], "auto"),
        ([{**WEATHER, "strict": None}], "auto"),
        ([CLOCK], "auto"),
        ([loose, CLOCK], "auto"),
    ):
        await created(client, tools=tools, tool_choice=choice)
    free, forced, strict, null, left_out, both = (request.params.grammar for request in engine.requests)
    assert free is None
    for grammar in (forced, strict, null, left_out, both):
        assert grammar is not None and grammar in engine.grammars
    schema = {"name": "arguments_0", "json_schema": SCHEMA}
    assert all(schema in json.loads(grammar.source)["grammars"] for grammar in (forced, strict, null))
    assert {"name": "arguments_0", "json_schema": {"type": "object"}} in json.loads(both.source)["grammars"]


@pytest.mark.parametrize(("strict", "alone"), [(True, True), (None, False)])
async def test_only_what_is_called_strict_has_its_schema_checked_to_the_letter(
    client: httpx.AsyncClient, engine: FakeEngine, strict: bool | None, alone: bool
) -> None:
    await created(client, tools=[{**WEATHER, "strict": strict}])
    assert ("json_schema" in {grammar.kind for grammar in engine.grammars}) is alone


@pytest.mark.parametrize(
    ("extra", "param", "code"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
        ({"tools": [{"name": "f"}]}, "tools[0].type", "invalid_value"),
        ({"tools": [CLOCK, {"type": []}]}, "tools[1].type", "invalid_value"),
        ({"tools": [{"type": {}}]}, "tools[0].type", "invalid_value"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": []}]}]}, "tools[0].tools[0].type", "invalid_value"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing_required_parameter"),
        ({"tools": [{"type": "function", "function": {"name": "f"}, "name": "f"}]}, "tools[0].function", "unknown_parameter"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "invalid_value"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1].name", "invalid_value"),
        ({"tools": [CLOCK | {"parameters": {"type": "array"}}]}, "tools[0].parameters.type", "invalid_value"),
        ({"tools": [CLOCK | {"allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers", "unsupported_parameter"),
        ({"tool_choice": "often"}, "tool_choice", "invalid_value"),
        ({"tool_choice": 5}, "tool_choice", "invalid_type"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name", "invalid_value"),
        ({"tools": [CLOCK], "tool_choice": {"type": "web_search"}}, "tool_choice.type", "invalid_value"),
        ({"tools": [WEATHER | {"parameters": {"title": "refuse me"}}]}, "tools[0].parameters", "invalid_value"),
        ({"tools": [CLOCK], "tool_choice": "required", "guided_regex": "a+"}, "guided_regex", "invalid_value"),
        ({"tools": [CLOCK | {"parameters": deep(500)}]}, "tools", "invalid_value"),
        ({"tools": [CLOCK], "include": ["message.output_text.logprobs"]}, "include", "invalid_value"),
    ],
)
async def test_what_is_wrong_is_named(
    client: httpx.AsyncClient, engine: FakeEngine, extra: dict[str, Any], param: str, code: str
) -> None:
    assert_error(await client.post(URL, json=body_of(**extra)), 400, param, code)
    assert engine.requests == []


async def test_openais_client_reads_calls(app: Any) -> None:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    async with AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http) as openai:
        tools: Any = [WEATHER, CLOCK]
        async with openai.responses.stream(model="tiny", input="Hi", tools=tools) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        whole = await openai.responses.create(model="tiny", input="Hi", tools=tools)
        calls = [item for item in whole.output if item.type == "function_call"]
        assert [(call.name, call.arguments) for call in calls] == [("get_weather", '{"city": "Rome"}'), ("clock", "{}")]
        assert final.output_text == whole.output_text == "Let me see.\nNow wait."
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == '{"city": "Rome"}{}'
        # as callers that keep the conversation themselves send it
        results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "fine"} for call in calls]
        for items in (whole.output, [item.model_dump() for item in whole.output]):
            again = await openai.responses.create(model="tiny", input=[*items, *results], tools=tools)
            assert isinstance(again, Response)
