"""/v1/responses: what reaches the engine, and what comes back."""

import json
from typing import Any, ClassVar

import httpx
import pytest
from openai import AsyncOpenAI

from speculative.request import Grammar
from tests.app.asking import ITEM, URL, body_of, created, text_of
from tests.app.fakes import FakeEngine
from tests.app.test_errors import assert_error

UNTOUCHED = {
    "object": "response",
    "completed_at": None,
    "status": "completed",
    "background": False,
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "model": "tiny",
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 0.7,
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 0.95,
    "truncation": "disabled",
    "user": None,
}


class TestWhole:
    async def test_every_field(self, client: httpx.AsyncClient) -> None:
        document = await created(client)
        number = document.pop("id").removeprefix("resp_")
        assert isinstance(document.pop("created_at"), int)
        assert isinstance(document.pop("completed_at"), int)
        assert document.pop("metrics")["speculative_decoding"]["num_spec_tokens"] == 6
        assert document.pop("output") == [
            {
                "id": f"msg_{number}_0",
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Hello, world", "annotations": [], "logprobs": []}],
            }
        ]
        assert document.pop("usage") == {
            "input_tokens": 3,
            "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 6,
        }
        assert document == {name: value for name, value in UNTOUCHED.items() if name != "completed_at"}

    async def test_what_was_asked_for_is_told_back(self, client: httpx.AsyncClient) -> None:
        given = {
            "instructions": "Be brief.",
            "max_output_tokens": 9,
            "max_tool_calls": 2,
            "metadata": {"a": "b"},
            "temperature": 0.5,
            "top_p": 0.25,
            "user": "Ann",
            "safety_identifier": "x",
            "prompt_cache_key": "y",
            "store": False,
        }
        document = await created(client, **given)
        assert {name: document[name] for name in given} == given

    async def test_parameters_reach_the_engine(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        given: dict[str, Any] = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.1, "seed": 4, "speculative": False}
        given |= {"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.1, "stop": ["x"]}
        await created(client, max_output_tokens=7, priority=-2, cache_salt="mine", **given)
        request = engine.requests[0]
        assert request.params.max_tokens == 7 and request.priority == -2
        for name, value in given.items():
            assert getattr(request.params, name) == (tuple(value) if isinstance(value, list) else value)

    async def test_the_limit_makes_it_incomplete(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.finish = "length"
        document = await created(client)
        assert (document["status"], document["completed_at"]) == ("incomplete", None)
        assert document["incomplete_details"] == {"reason": "max_output_tokens"}
        assert document["output"][0]["status"] == "incomplete"
        assert text_of(document) == "Hello, world"

    async def test_logprobs(self, client: httpx.AsyncClient) -> None:
        document = await created(client, include=["message.output_text.logprobs"], top_logprobs=2)
        assert document["top_logprobs"] == 2
        logprobs = document["output"][0]["content"][0]["logprobs"]
        assert [each["token"] for each in logprobs] == ["b", "c", "d"]
        assert [each["token"] for each in logprobs[0]["top_logprobs"]] == ["b", "c"]

    @pytest.mark.parametrize(
        ("finish", "error", "status"), [("error", None, 500), ("abort", None, 503), ("stop", RuntimeError("secret"), 500)]
    )
    async def test_an_error_is_an_error(
        self, client: httpx.AsyncClient, engine: FakeEngine, finish: str, error: Exception | None, status: int
    ) -> None:
        engine.finish, engine.error = finish, error
        response = await client.post(URL, json=body_of())
        assert response.status_code == status
        assert "secret" not in response.text


class TestFormat:
    SCHEMA: ClassVar[dict[str, Any]] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    FLAT: ClassVar[dict[str, Any]] = {"type": "json_schema", "name": "n", "description": "d", "schema": SCHEMA, "strict": True}

    @pytest.mark.parametrize(
        ("extra", "grammar"),
        [
            ({"text": {"format": {"type": "text"}}}, None),
            ({"text": {"format": {"type": "json_object"}}}, Grammar("json_schema", '{"type": "object"}')),
            ({"text": {"format": FLAT}}, Grammar("json_schema", json.dumps(SCHEMA))),
            ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ],
    )
    async def test_the_engine_follows_it(
        self, client: httpx.AsyncClient, engine: FakeEngine, extra: dict[str, Any], grammar: Grammar | None
    ) -> None:
        document = await created(client, **extra)
        assert engine.requests[0].params.grammar == grammar
        assert engine.grammars == ([] if grammar is None else [grammar])
        assert document["text"] == {"format": {"type": "text"}, "verbosity": "medium"} | extra.get("text", {})


class TestInput:
    async def test_items_as_the_template_gets_them(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        items = [
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]},
            # as openai's package sends an answer back
            {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "phase": "commentary",
                "content": [
                    {"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []},
                    {"type": "refusal", "refusal": "No more."},
                ],
            },
            {"id": "fc_1", "type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}', "status": "completed"},
            {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a":'},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
        ]
        document = await created(client, instructions="Be brief.", input=items)

        def call(id_: str, arguments: Any) -> dict[str, Any]:
            return {"id": id_, "type": "function", "function": {"name": "add", "arguments": arguments}}

        assert engine.tokenizer.conversations == [
            [
                {"role": "system", "content": "Be brief."},
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "one\ntwo"},
                {
                    "role": "assistant",
                    "content": "Let me see.\nNo more.",
                    "tool_calls": [call("c1", {"a": 1}), call("c2", '{"a":')],
                },
                {"role": "tool", "content": "2", "tool_call_id": "c1"},
                {"role": "tool", "content": "3", "tool_call_id": "c2"},
            ]
        ]
        listed = (await client.get(f"{URL}/{document['id']}/input_items?order=asc")).json()["data"]
        for item in listed:
            ITEM.validate_python(item)
        assert [item["id"] for item in listed if "_" in item["id"]][2:4] == ["msg_1", "fc_1"]

    @pytest.mark.parametrize(
        ("extra", "param", "code"),
        [
            ({"input": None}, "input", "missing_required_parameter"),
            ({"input": []}, "input", "missing_required_parameter"),
            ({"input": 5}, "input", "invalid_type"),
            ({"input": [5]}, "input[0].type", "invalid_value"),
            ({"input": [{"type": "computer_call_output"}]}, "input[0].type", "invalid_value"),
            ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role", "invalid_value"),
            ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type", "invalid_value"),
            ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "invalid_type"),
            ({"input": [{"role": "user", "content": "x", "mood": "good"}]}, "input[0].mood", "unknown_parameter"),
            ({"input": [{"role": "assistant", "content": "x", "phase": "overture"}]}, "input[0].phase", "unsupported_parameter"),
            (
                {"input": [{"type": "function_call", "name": "f", "call_id": "c"}]},
                "input[0].arguments",
                "missing_required_parameter",
            ),
            ({"input": "break the template"}, "input", "invalid_value"),
            ({"input": "x" * 200}, "input", "context_length_exceeded"),
            ({"max_output_tokens": 1000}, "max_output_tokens", "context_length_exceeded"),
            ({"max_tokens": 5}, "max_tokens", "unknown_parameter"),
            ({"n": 2}, "n", "unknown_parameter"),
            ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
            ({"temperature": 3}, "temperature", "invalid_value"),
            ({"metadata": {"a": "b" * 513}}, "metadata.a", "invalid_value"),
            ({"include": ["everything"]}, "include[0]", "invalid_value"),
            ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
            ({"background": True, "store": False}, "background", "invalid_value"),
            ({"background": True, "stream": True}, "stream", "unsupported_parameter"),
            ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
            ({"response_format": {"type": "json_object"}}, "response_format", "unknown_parameter"),
            ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
            ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", "missing_required_parameter"),
            ({"text": {"format": {"type": "json_object", "name": "n"}}}, "text.format.name", "invalid_value"),
            ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex", "invalid_value"),
            (
                {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"title": "refuse me"}}}},
                "text.format",
                "invalid_value",
            ),
            ({"text": {"verbosity": "low"}}, "text.verbosity", "unsupported_parameter"),
            ({"reasoning": {"effort": "high"}}, "reasoning.effort", "unsupported_parameter"),
            ({"conversation": "conv_1"}, "conversation", "unsupported_parameter"),
            ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
            ({"service_tier": "priority"}, "service_tier", "unsupported_parameter"),
            ({"nonsense": 1}, "nonsense", "unknown_parameter"),
            ({"user": "\ud800"}, "user", "invalid_value"),
            ({"input": [{"id": "\ud800", "role": "user", "content": "x"}]}, "input", "invalid_value"),
        ],
    )
    async def test_what_is_wrong_is_named(
        self, client: httpx.AsyncClient, engine: FakeEngine, extra: dict[str, Any], param: str, code: str
    ) -> None:
        assert_error(await client.post(URL, content=json.dumps(body_of(**extra))), 400, param, code)
        assert engine.requests == []

    async def test_neutral_values_are_accepted(self, client: httpx.AsyncClient) -> None:
        neutral: dict[str, Any] = {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "truncation": "disabled"}
        neutral |= {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "reasoning": {"effort": None, "summary": None}}
        neutral |= {"service_tier": "auto", "include": ["reasoning.encrypted_content"], "background": False, "stream": False}
        neutral |= {"client_metadata": {"session": "s"}, "repeat_penalty": 1.0}
        await created(client, **neutral, conversation=None, prompt=None, stream_options=None)
        await created(client, reasoning={"effort": "none", "summary": "auto", "generate_summary": "concise"})

    async def test_what_another_model_thought_is_kept_and_not_told_to_this_one(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "x"}
        said = {"role": "assistant", "content": "Yes"}
        document = await created(
            client, input=[{"role": "user", "content": "Hi"}, thought, said, {"role": "user", "content": "Why?"}]
        )
        assert [message["content"] for message in engine.tokenizer.conversations[-1]] == ["Hi", "Yes", "Why?"]
        listed = (await client.get(f"{URL}/{document['id']}/input_items?order=asc")).json()["data"]
        assert listed[1] == thought | {"status": "completed"}

    async def test_what_is_never_there_may_be_included_afterwards(self, client: httpx.AsyncClient) -> None:
        url = f"{URL}/{(await created(client))['id']}"
        for path in (url, f"{url}/input_items"):
            assert (await client.get(path, params={"include[]": "reasoning.encrypted_content"})).status_code == 200
            wanted = {"include": "message.output_text.logprobs"}
            assert_error(await client.get(path, params=wanted), 400, "include", "unsupported_parameter")

    async def test_an_unknown_model_is_a_404(self, client: httpx.AsyncClient) -> None:
        assert_error(await client.post(URL, json=body_of(model="gpt-5")), 404, "model", "model_not_found")


async def test_openais_client_reads_it(app: Any) -> None:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    async with AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http) as openai:
        whole = await openai.responses.create(model="tiny", input="Hi")
        assert (whole.output_text, whole.usage and whole.usage.total_tokens) == ("Hello, world", 6)
        async with openai.responses.stream(model="tiny", input="And?", previous_response_id=whole.id) as stream:
            text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
            final = await stream.get_final_response()
        assert text == final.output_text == "Hello, world"
        assert (await openai.responses.retrieve(final.id)).output_text == final.output_text
        items = [item async for item in openai.responses.input_items.list(final.id, limit=1, order="asc")]
        assert [item.type for item in items] == ["message"] * 3
        await openai.responses.delete(final.id)
        # as callers that keep the conversation themselves send it
        again = await openai.responses.create(model="tiny", input=[{"role": "user", "content": "Hi"}, *whole.output], store=False)
        assert again.status == "completed"
