"""Structured output over HTTP, with the bundled pair: openai's client, and answers that always have their form."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.integration.conftest import Server

pytestmark = pytest.mark.integration


class Booking(BaseModel):
    """What a table is booked with."""

    restaurant: str = Field(max_length=24)
    people: int = Field(ge=1, le=12)
    meal: Literal["lunch", "dinner"]
    outside: bool
    wishes: list[Literal["quiet", "window", "high chair"]] = Field(max_length=2)


MESSAGES: Any = [{"role": "user", "content": "A table for four in San José, outside, tomorrow at noon, please."}]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)


def test_the_sdk_parses_answers_into_models(client: openai.OpenAI) -> None:
    for seed in range(8):
        answer = client.chat.completions.parse(
            model="concierge", messages=MESSAGES, response_format=Booking, temperature=1, seed=seed, max_tokens=200
        )
        assert answer.choices[0].finish_reason == "stop"
        assert isinstance(answer.choices[0].message.parsed, Booking)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.2, "seed": 3}], ids=str)
@pytest.mark.parametrize(
    "form",
    [
        {"structured_outputs": {"json": Booking.model_json_schema()}},
        {"structured_outputs": {"regex": r"[A-Z][a-z]{2,9} at \d{1,2}(am|pm)"}},
        {"structured_outputs": {"choice": ["Yes, at once.", "Yes, but later.", "No 😕"]}},
        {"response_format": {"type": "json_object"}},
    ],
    ids=str,
)
def test_text_is_the_same_with_speculation_on_and_off(
    client: openai.OpenAI, form: dict[str, Any], sampling: dict[str, Any]
) -> None:
    def ask(**extra: Any) -> tuple[str, int]:
        body = {"structured_outputs": form["structured_outputs"]} if "structured_outputs" in form else {}
        given: dict[str, Any] = {"response_format": form["response_format"]} if "response_format" in form else {}
        answer = client.chat.completions.create(
            model="concierge", messages=MESSAGES, max_tokens=100, n=2, extra_body=body | extra, **given, **sampling
        )
        passes = answer.model_extra["metrics"]["speculative_decoding"]["num_target_calls"]  # type: ignore[index]
        return "\n".join(choice.message.content or "" for choice in answer.choices), passes

    (text, passes), (plain, most) = ask(), ask(speculative=False)
    assert text == plain
    assert passes < most


def test_streams_carry_the_same_json(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "concierge", "messages": MESSAGES, "temperature": 0.8, "seed": 2, "max_tokens": 200}
    given["response_format"] = {"type": "json_schema", "json_schema": {"name": "booking", "schema": Booking.model_json_schema()}}
    whole = client.chat.completions.create(**given).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**given, stream=True)]
    assert "".join(pieces) == whole
    Booking.model_validate(json.loads(whole or ""))


def test_an_unsupported_schema_is_a_400_that_says_which_keyword(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="concierge",
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        )
    assert refused.value.param == "response_format"
    assert "'uniqueItems'" in str(refused.value) and "#/properties/a" in str(refused.value)
