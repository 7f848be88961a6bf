"""Conversations whose tools go by other names."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from typing import Any

import pytest

from training.errors import DataError
from training.example import Example
from training.tool_names import renamed, with_other_names


def function(name: str, *parameters: str, required: tuple[str, ...] = ()) -> dict[str, Any]:
    properties = {parameter: {"type": "string", "description": f"What {parameter} is"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": "Does it", "parameters": schema}}


def call(name: str, **arguments: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


TOOLS = [
    function("FindFlights", "departure_date", "destination_city", "seats", required=("destination_city",)),
    function("BookHotel", "destination_city", "star_rating"),
]
MESSAGES = [
    {"role": "user", "content": "I want to see the destination_city of Oslo."},
    {"role": "assistant", "content": None, "tool_calls": [call("FindFlights", destination_city="Oslo", seats="2")]},
    {"role": "tool", "name": "FindFlights", "content": '[{"destination_city": "Oslo", "price": 3}, {"price": 4, "seats": "é"}]'},
    {"role": "assistant", "content": "There is one."},
]
EXAMPLE = Example("some.jsonl:1", MESSAGES, TOOLS)


def parameters(example: Example) -> list[list[str]]:
    return [list(tool["function"]["parameters"]["properties"]) for tool in example.tools or ()]


@pytest.mark.parametrize("seed", range(30))
def test_tools_calls_and_answers_agree_on_the_new_names(seed: int) -> None:
    new = renamed(EXAMPLE, random.Random(seed))
    (flights, hotels), old = parameters(new), parameters(EXAMPLE)
    given = dict(zip(old[0] + old[1], flights + hotels, strict=True))
    assert flights[1] == hotels[0]  # both know the city
    assert len(set(given.values())) == len(given) and "price" not in given.values()
    tool, answer = new.tools[0]["function"], new.messages[2]  # type: ignore[index]
    assert tool["parameters"]["required"] == [given["destination_city"]]
    made = new.messages[1]["tool_calls"][0]["function"]
    assert made["name"] == tool["name"] == answer["name"] != new.tools[1]["function"]["name"]  # type: ignore[index]
    assert json.loads(made["arguments"]) == {given["destination_city"]: "Oslo", given["seats"]: "2"}
    assert json.loads(answer["content"]) == [{given["destination_city"]: "Oslo", "price": 3}, {"price": 4, given["seats"]: "é"}]
    assert [message["content"] for message in new.messages[::3]] == [message["content"] for message in MESSAGES[::3]]


def test_keys_in_alphabetical_order_are_so_again() -> None:
    for seed in range(30):
        new = renamed(EXAMPLE, random.Random(seed))
        arguments = list(json.loads(new.messages[1]["tool_calls"][0]["function"]["arguments"]))
        assert all(one < other for one, other in pairwise(arguments))


def test_names_differ_from_one_variant_to_the_next_and_some_stay() -> None:
    cities = [parameters(renamed(EXAMPLE, random.Random(seed)))[0][1] for seed in range(200)]
    assert 0.2 < cities.count("destination_city") / 200 < 0.7
    assert {"destination", "city"} < set(cities) and len(set(cities)) > 10


def test_the_example_itself_stays_as_it_is() -> None:
    before = json.dumps([EXAMPLE.messages, EXAMPLE.tools])
    renamed(EXAMPLE, random.Random(1))
    assert json.dumps([EXAMPLE.messages, EXAMPLE.tools]) == before


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "not JSON"},
        {"role": "tool", "content": "[1, 2]"},
        {"role": "tool", "content": '"seats"'},
        {"role": "tool", "content": None},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "Other", "arguments": "not JSON"}}]},
    ],
)
def test_what_holds_no_names_stays_as_it_is(message: dict[str, Any]) -> None:
    assert renamed(Example("here", [message], TOOLS), random.Random(3)).messages == [message]


def test_arguments_may_be_objects() -> None:
    made = {"function": {"name": "FindFlights", "arguments": {"seats": "2"}}}
    for seed in range(20):
        new = renamed(Example("here", [{"role": "assistant", "content": None, "tool_calls": [made]}], TOOLS), random.Random(seed))
        assert list(new.messages[0]["tool_calls"][0]["function"]["arguments"]) == [parameters(new)[0][2]]


def test_variants_stand_behind_conversations_with_tools_and_repeat_with_the_seed() -> None:
    plain = Example("there", [{"role": "user", "content": "Hi"}], None)
    first, *others, last = with_other_names([EXAMPLE, plain], 3, seed=5)
    assert first is EXAMPLE and last is plain and len(others) == 3
    assert len({json.dumps(each.tools) for each in others}) == 3
    assert list(with_other_names([EXAMPLE, plain], 3, seed=5))[1:4] == others
    assert list(with_other_names([EXAMPLE, plain], 3, seed=6))[1:4] != others


def test_what_cannot_be_renamed_is_said_with_its_line() -> None:
    nameless = Example("some.jsonl:7", [], [{"type": "function", "function": {"description": "No name"}}])
    with pytest.raises(DataError, match=r"some\.jsonl:7: its tools or calls"):
        list(with_other_names([nameless], 1, seed=0))
