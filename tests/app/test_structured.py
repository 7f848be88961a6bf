"""Answers of a form: what callers may ask for, as OpenAI and vLLM word it, and what the engine is told."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from speculative.request import Grammar
from tests.app.fakes import FakeEngine, chat_body

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
DEEP: Any = 1
for _ in range(100):
    DEEP = {"items": DEEP}
REFUSED = {"title": "refuse me"}
DEEPER = "response_format.json_schema.schema"
AS_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA))
AS_FAR_AS_POSSIBLE = Grammar("llguidance", json.dumps({"grammars": [{"json_schema": SCHEMA}]}))
ANY_OBJECT = Grammar("json_schema", '{"type": "object"}')
FORMS: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}}, AS_SCHEMA),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": False}}},
        AS_FAR_AS_POSSIBLE,
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, Grammar("json_schema", "{}")),
    ({"structured_outputs": {"json": SCHEMA}}, AS_SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, AS_SCHEMA),
    ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
    ({"structured_outputs": {"json_object": False}}, None),
    ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
    ({"structured_outputs": {"choice": ["a", 'é"\n']}}, Grammar("lark", 'start: "a" | "é\\"\\n"')),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar("lark", 'root ::= "a"')),
    ({"guided_json": SCHEMA}, AS_SCHEMA),
    ({"guided_regex": "a+"}, Grammar("regex", "a+")),
    ({"guided_choice": ["a", "b"]}, Grammar("lark", 'start: "a" | "b"')),
    ({"guided_grammar": 'root ::= "a"'}, Grammar("lark", 'root ::= "a"')),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("extra", "grammar"), FORMS, ids=lambda value: str(value)[:60])
async def test_the_engine_follows_what_callers_ask_for(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, extra: dict[str, Any], grammar: Grammar | None
) -> None:
    body = chat_body(**extra) if "chat" in path else {"prompt": "Hi", **extra}
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert engine.requests[0].params.grammar == grammar
    # Compiled before it is asked for, where that holds nobody else up.
    assert engine.grammars == ([] if grammar is None else [grammar])


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "n"}}}, "response_format.json_schema"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"colour": "red"}}, "structured_outputs.colour"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "true"}, "guided_json"),
        ({"guided_json": "[" * 100_000}, "guided_json"),
        ({"guided_json": DEEP}, "guided_json"),
        ({"structured_outputs": {"json": json.dumps(DEEP)}}, "structured_outputs.json"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": DEEP}}}, DEEPER),
        ({"guided_regex": "refuse me"}, "guided_regex"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"title": "refuse me"}}}},
            "response_format",
        ),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_what_cannot_be_followed_is_a_400_that_names_the_parameter(
    client: httpx.AsyncClient, engine: FakeEngine, extra: dict[str, Any], param: str
) -> None:
    response = await client.post("/v1/chat/completions", json=chat_body(**extra))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert engine.requests == []
