"""Tools with the bundled pair: a dialogue that books a table, forced calls, and the same whole, streamed and without drafts."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.integration.conftest import Server

pytestmark = pytest.mark.integration


def function(name: str, description: str, required: list[str], **properties: list[str] | None) -> dict[str, Any]:
    """A strict tool whose arguments are all texts, some of them one of a few."""
    schemas = {name: {"type": "string"} | ({"enum": values} if values else {}) for name, values in properties.items()}
    parameters = {"type": "object", "properties": schemas, "required": required, "additionalProperties": False}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters, "strict": True},
    }


SEATS = ["1", "2", "3", "4", "5", "6"]
TOOLS = [
    function("FindRestaurants", "Find a restaurant by kind of food", ["city", "cuisine"], city=None, cuisine=None),
    function(
        "ReserveRestaurant",
        "Reserve a table at a restaurant",
        ["city", "restaurant_name", "time"],
        city=None,
        date=None,
        party_size=SEATS,
        restaurant_name=None,
        time=None,
    ),
]
PLACE = {"restaurant_name": "Trattoria Lucia", "city": "San Jose"}
RESULTS = {
    "FindRestaurants": json.dumps([PLACE | {"cuisine": "Italian", "price_range": "moderate"}]),
    "ReserveRestaurant": json.dumps([PLACE | {"date": "2019-03-01", "party_size": "2", "time": "19:00"}]),
}
TURNS = [
    "I am looking for an Italian restaurant in San Jose.",
    "That sounds good. Please reserve a table for two at 7 pm.",
    "Yes, that is right.",
    "Thank you, that is all.",
]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key="none")


def ask(client: openai.OpenAI, messages: list[Any], **options: Any) -> ChatCompletion:
    given = {"model": "concierge", "tools": TOOLS, "temperature": 0, "max_tokens": 200, **options}
    return client.chat.completions.create(messages=messages, **given)


def calls(completion: ChatCompletion) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in completion.choices[0].message.tool_calls or ()]


def assert_follows(name: str, arguments: str) -> None:
    """A call of one of the tools, with every argument it needs, each of the values that it may have."""
    (tool,) = (tool["function"] for tool in TOOLS if tool["function"]["name"] == name)
    given, schema = json.loads(arguments), tool["parameters"]
    assert set(schema["required"]) <= given.keys() <= schema["properties"].keys()
    for argument, value in given.items():
        assert isinstance(value, str)
        assert value in schema["properties"][argument].get("enum", [value])


def test_a_table_is_booked(client: openai.OpenAI) -> None:
    messages: list[Any] = []
    called: list[str] = []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        for _ in range(4):
            answer = ask(client, messages)
            plain = ask(client, messages, extra_body={"speculative": False})
            assert calls(answer) == calls(plain)
            assert answer.choices[0].message.content == plain.choices[0].message.content
            messages.append(answer.choices[0].message)
            made = answer.choices[0].message.tool_calls or []
            assert answer.choices[0].finish_reason == ("tool_calls" if made else "stop")
            for call in made:
                assert_follows(call.function.name, call.function.arguments)
                called.append(call.function.name)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULTS[call.function.name]})
            if not made:
                break
    assert set(called) == set(RESULTS)
    assert messages[-1].content


RESERVE = {"type": "function", "function": {"name": "ReserveRestaurant"}}
FORCED = ["required", RESERVE, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [RESERVE]}}]
QUESTIONS = ["Hello there!", "What is 12 times 12?", "Book me a table for four in Oakland at noon."]


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("choice", FORCED, ids=["required", "named", "allowed"])
def test_forced_calls_follow_their_schemas(client: openai.OpenAI, choice: Any, question: str) -> None:
    messages = [{"role": "user", "content": question}]
    options = {"tool_choice": choice, "parallel_tool_calls": False}
    answer = ask(client, messages, **options)
    ((name, arguments),) = calls(answer)
    assert_follows(name, arguments)
    assert choice == "required" or name == "ReserveRestaurant"
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (None, "tool_calls")
    assert calls(ask(client, messages, **options, extra_body={"speculative": False})) == calls(answer)
    assert calls(ask(client, messages, **options, response_format={"type": "json_object"})) == calls(answer)


def test_no_tool_is_called_but_those_allowed(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": TURNS[0]}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [RESERVE]}}
    free, answer = ask(client, messages), ask(client, messages, tool_choice=choice)
    assert {name for name, _ in calls(free)} == {"FindRestaurants"}
    assert {name for name, _ in calls(answer)} <= {"ReserveRestaurant"}
    assert answer.usage is not None and free.usage is not None
    assert answer.usage.prompt_tokens == free.usage.prompt_tokens
    assert calls(ask(client, messages, tool_choice=choice, extra_body={"speculative": False})) == calls(answer)


@pytest.mark.parametrize("options", [{}, {"tool_choice": "required"}, {"temperature": 1.0, "seed": 5}], ids=str)
def test_a_stream_says_the_same(client: openai.OpenAI, options: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": TURNS[0]}]
    whole = ask(client, messages, **options)
    given: dict[str, Any] = {"model": "concierge", "tools": TOOLS, "temperature": 0, "max_tokens": 200, **options}
    with client.chat.completions.stream(messages=messages, stream_options={"include_usage": True}, **given) as stream:
        streamed = stream.get_final_completion()
    assert calls(streamed) == calls(whole)
    assert (streamed.choices[0].message.content or None) == whole.choices[0].message.content
    assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens


def test_tool_choice_none_calls_nothing(client: openai.OpenAI) -> None:
    answer = ask(client, [{"role": "user", "content": TURNS[0]}], tool_choice="none")
    assert not calls(answer)
    assert answer.choices[0].message.content


def test_a_schema_that_cannot_be_followed_is_named(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object", "not": {}}}}
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, [{"role": "user", "content": "Hello!"}], tools=[tool])
    assert error.value.param == "tools[0].function.parameters"
