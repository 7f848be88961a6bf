"""/v1/responses of a real server, by openai's own client."""

from __future__ import annotations

import time
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.integration.conftest import Server, start_server, stop_server
from tests.integration.test_server import until

pytestmark = pytest.mark.integration

ASK = "I would like a table for two in San Jose."


def tokens(response: Any) -> tuple[int, int]:
    """Of prompt and answer; how many of them were cached differs from one asking to the next."""
    return response.usage.input_tokens, response.usage.output_tokens


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key="none")


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_stream_says_what_the_whole_response_says(client: openai.OpenAI, temperature: float) -> None:
    options: dict[str, Any] = {"temperature": temperature, "max_output_tokens": 40, "extra_body": {"seed": 3}}
    whole = client.responses.create(model="concierge", input=ASK, **options)
    with client.responses.stream(model="concierge", input=ASK, **options) as stream:
        events = list(stream)
    last = events[-1].response
    assert whole.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert (last.output_text, last.status, tokens(last)) == (whole.output_text, whole.status, tokens(whole))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == f"response.{whole.status}"
    assert whole.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


@pytest.mark.parametrize("temperature", [0, 1])
def test_it_says_what_chat_says_with_speculation_and_without(client: openai.OpenAI, temperature: float) -> None:
    said = [
        client.responses.create(
            model="concierge",
            input=ASK,
            instructions="Be brief.",
            temperature=temperature,
            max_output_tokens=40,
            extra_body={"seed": 3, "speculative": speculative},
        ).output_text
        for speculative in (True, False)
    ]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK}]
    chat = client.chat.completions.create(model="concierge", messages=messages, temperature=temperature, max_tokens=40, seed=3)
    assert said == [chat.choices[0].message.content] * 2


def test_turns_by_id_are_the_conversation_sent_whole(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "concierge", "temperature": 0, "max_output_tokens": 24}
    first = client.responses.create(input=ASK, instructions="Be brief.", **options)
    second = client.responses.create(input="At seven.", previous_response_id=first.id, **options)
    third = client.responses.create(input="Thanks!", previous_response_id=second.id, instructions="Be kind.", **options)
    conversation: list[Any] = [{"role": "user", "content": ASK}, *first.output, {"role": "user", "content": "At seven."}]
    assert client.responses.create(input=conversation, **options).output_text == second.output_text
    conversation += [*second.output, {"role": "user", "content": "Thanks!"}]
    whole = client.responses.create(input=conversation, instructions="Be kind.", **options)
    assert (whole.output_text, tokens(whole)) == (third.output_text, tokens(third))
    kept = list(client.responses.input_items.list(third.id, limit=2, order="asc"))
    assert [item.content[0].text for item in kept] == [
        ASK,
        first.output_text,
        "At seven.",
        second.output_text,
        "Thanks!",
    ]


def test_calls_are_those_of_chat_streamed_and_not(client: openai.OpenAI) -> None:
    function = {
        "name": "find_restaurants",
        "description": "Find a restaurant in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
    ask = "Find me an Italian restaurant in San Jose."
    chat = client.chat.completions.create(
        model="concierge",
        messages=[{"role": "user", "content": ask}],
        tools=[{"type": "function", "function": {**function, "strict": True}}],  # which Responses are where nothing is said
        temperature=0,
        max_tokens=80,
    )
    called = [(call.function.name, call.function.arguments) for call in chat.choices[0].message.tool_calls]
    options: dict[str, Any] = {"model": "concierge", "temperature": 0, "max_output_tokens": 80}
    tools: Any = [{"type": "function", **function}]
    whole = client.responses.create(input=ask, tools=tools, **options)
    with client.responses.stream(input=ask, tools=tools, **options) as stream:
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        assert [(item.name, item.arguments) for item in response.output if item.type == "function_call"] == called
    results: Any = [
        {"type": "function_call_output", "call_id": item.call_id, "output": '{"name": "Luigi"}'}
        for item in whole.output
        if item.type == "function_call"
    ]
    by_id = client.responses.create(input=results, previous_response_id=whole.id, tools=tools, **options)
    sent = client.responses.create(input=[{"role": "user", "content": ask}, *whole.output, *results], tools=tools, **options)
    assert (by_id.output_text, tokens(by_id)) == (sent.output_text, tokens(sent))
    counted = client.responses.input_tokens.count(
        model="concierge", input=results, previous_response_id=whole.id, tools=tools, truncation="disabled"
    )
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", tokens(by_id)[0])


class Booking(BaseModel):
    city: Literal["Rome", "San Jose"]
    people: Literal[2, 4]


def test_openais_client_parses_a_form(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model="concierge", input=ASK, text_format=Booking, temperature=0, max_output_tokens=60)
    assert isinstance(parsed.output_parsed, Booking)


def test_retrieve_and_delete(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="concierge",
        input=ASK,
        max_output_tokens=5,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        metadata={"a": "b"},
    )
    assert len(response.output[0].content[0].logprobs) == response.usage.output_tokens
    assert client.responses.retrieve(response.id) == response
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError, match="Previous response"):
        client.responses.create(model="concierge", input="And?", previous_response_id=response.id)


def test_a_background_response_comes_to_its_end(client: openai.OpenAI) -> None:
    response = client.responses.create(model="concierge", input=ASK, temperature=0, max_output_tokens=24, background=True)
    assert response.status == "queued"
    deadline = time.monotonic() + 60
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        response = client.responses.retrieve(response.id)
    whole = client.responses.create(model="concierge", input=ASK, temperature=0, max_output_tokens=24)
    assert (response.status, response.output_text) == (whole.status, whole.output_text)


def test_cancelling_frees_the_slot() -> None:
    server = start_server("--dtype", "float32", "--max-num-seqs", "1")
    try:
        client = openai.OpenAI(base_url=server.base_url, api_key="none")
        # Its end tokens do not end it, so that it is still being written when it is cancelled.
        endless: dict[str, Any] = {"ignore_eos": True, "temperature": 1}
        response = client.responses.create(model="concierge", input=ASK, background=True, extra_body=endless)
        until(lambda: server.metric("moaserve_num_requests_running") == 1)
        cancelled = client.responses.cancel(response.id)
        assert (cancelled.id, cancelled.status) == (response.id, "cancelled")
        until(lambda: server.metric("moaserve_num_requests_running") == 0)
        # The one slot is there for others.
        assert client.responses.create(model="concierge", input=ASK, max_output_tokens=3, timeout=30).output_text
        assert client.responses.retrieve(response.id).status == "cancelled"
        left = client.responses.create(model="concierge", input=ASK, background=True, extra_body=endless)
        assert left.status == "queued"
    finally:
        assert stop_server(server) == 0  # also with a response in the making
