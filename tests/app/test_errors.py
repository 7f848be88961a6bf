"""Whatever is wrong with a request: OpenAI's error object, the right status, and the name of the culprit."""

import json
from typing import Any

import httpx
import pytest

from app import parameters
from speculative.errors import EngineNotReadyError, ServerTimeoutError
from tests.app.fakes import FakeEngine, chat_body

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def assert_error(response: httpx.Response, status: int, param: str | None, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body: dict[str, Any] = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["param"], body["error"]["code"]) == (param, code), body
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    ("extra", "param", "code"),
    [
        ({"temperature": -0.1}, "temperature", "invalid_value"),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"temperature": "1"}, "temperature", "invalid_type"),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"top_p": 1.01}, "top_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"top_k": 1.5}, "top_k", "invalid_type"),
        ({"top_k": 2**31}, "top_k", "invalid_value"),
        ({"min_p": 2}, "min_p", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 3.5}, "max_tokens", "invalid_type"),
        ({"max_tokens": 2**31}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": 2**64}, "max_completion_tokens", "invalid_value"),
        ({"max_completion_tokens": -5}, "max_completion_tokens", "invalid_value"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 129}, "n", "invalid_value"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"seed": "7"}, "seed", "invalid_type"),
        ({"stop": 5}, "stop", "invalid_type"),
        ({"stop": ""}, "stop[0]", "invalid_value"),
        ({"stop": ["a", 1]}, "stop[1]", "invalid_type"),
        ({"stop": ["a"] * 17}, "stop", "invalid_value"),
        ({"stop": ["a" * 1000, "b" * 1001]}, "stop[1]", "invalid_value"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "invalid_value"),
        ({"presence_penalty": False}, "presence_penalty", "invalid_type"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"logit_bias": {"5": 101}}, "logit_bias[5]", "invalid_value"),
        ({"logit_bias": {"the": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"٣": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"03": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"5" * 5000: 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": [5]}, "logit_bias", "invalid_type"),
        ({"logprobs": 3}, "logprobs", "invalid_type"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "invalid_value"),
        ({"min_tokens": 2**31}, "min_tokens", "invalid_value"),
        ({"stop_token_ids": "7"}, "stop_token_ids", "invalid_type"),
        ({"ignore_eos": 1}, "ignore_eos", "invalid_type"),
        ({"priority": 0.5}, "priority", "invalid_type"),
        ({"priority": 2**63}, "priority", "invalid_value"),
        ({"cache_salt": ""}, "cache_salt", "invalid_value"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "invalid_value"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs", "invalid_value"),
        ({"prediction": "x"}, "prediction", "invalid_type"),
        ({"prediction": {"type": "image", "content": "x"}}, "prediction.type", "invalid_value"),
        ({"prediction": {"type": "content", "content": "\ud800"}}, "prediction.content", "invalid_value"),
        ({"prediction": {"type": "content", "content": [{"type": "x"}]}}, "prediction.content[0].type", "invalid_value"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"speculative": 1}, "speculative", "invalid_type"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"stream": True, "stream_options": {"nonsense": 1}}, "stream_options.nonsense", "unknown_parameter"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "unsupported_parameter",
        ),
        ({"no_such_thing": None}, "no_such_thing", "unknown_parameter"),
        ({"\ud800": 1}, None, "invalid_type"),
        ({"stop": "\ud800"}, "stop[0]", "invalid_value"),
        ({"model": 3}, "model", "invalid_type"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "Hi"}, "messages", "invalid_type"),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
        ({"messages": [{"role": "user", "content": "Hi", "mood": "good"}]}, "messages[0].mood", "unknown_parameter"),
        (
            {"messages": [{"role": "assistant", "content": "Hi", "audio": {"id": "x"}}]},
            "messages[0].audio",
            "unsupported_parameter",
        ),
        ({"messages": [{"role": "tool", "content": "4"}]}, "messages[0].tool_call_id", "missing_required_parameter"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
            "messages[0].content[1].type",
            "invalid_value",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages[0].content[0].text",
            "invalid_type",
        ),
        ({"messages": [{"role": "user", "content": "break the template"}]}, "messages", "invalid_value"),
        ({"max_tokens": 1000}, "max_tokens", "context_length_exceeded"),
        ({"max_completion_tokens": 1000}, "max_completion_tokens", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "x" * 200}], "stream": True}, "messages", "context_length_exceeded"),
    ],
)
async def test_a_wrong_chat_parameter_is_a_400_that_names_it(
    client: httpx.AsyncClient, engine: FakeEngine, extra: dict[str, Any], param: str | None, code: str
) -> None:
    error = assert_error(await client.post(CHAT, content=json.dumps(chat_body() | extra)), 400, param, code)
    assert error["type"] == "invalid_request_error"
    assert engine.requests == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": "Hi", "max_tokens": 2**31}, "max_tokens"),
        (TEXT, {"prompt": "Hi", "top_k": 2**40}, "top_k"),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2**31}, "max_output_tokens"),
        ("/v1/responses", {"input": "Hi", "max_tool_calls": 2**31}, "max_tool_calls"),
        ("/v1/responses", {"input": "Hi", "top_k": 2**31}, "top_k"),
    ],
)
async def test_numbers_that_no_engine_holds_are_refused(
    client: httpx.AsyncClient, engine: FakeEngine, path: str, body: dict[str, Any], param: str
) -> None:
    assert_error(await client.post(path, json=body), 400, param, "invalid_value")
    assert engine.requests == []


async def test_the_largest_numbers_reach_the_engine(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = chat_body(top_k=2**31 - 1, min_tokens=2**31 - 1, priority=2**63 - 1, seed=-(2**63))
    assert (await client.post(CHAT, json=body)).status_code == 200
    params = engine.requests[0].params
    assert (params.top_k, params.min_tokens, engine.requests[0].priority) == (2**31 - 1, 2**31 - 1, 2**63 - 1)


async def test_whole_numbers_may_be_written_as_fractions(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = chat_body(top_k=10.0, max_tokens=4.0, seed=3.0, n=1.0, min_tokens=2.0, priority=-1.0)
    assert (await client.post(CHAT, content=json.dumps(body))).status_code == 200
    params = engine.requests[0].params
    assert (params.top_k, params.max_tokens, params.seed, params.min_tokens) == (10, 4, 3, 2)
    assert type(params.top_k) is type(params.seed) is int and engine.requests[0].priority == -1
    for wrong in (True, 1.5, "1", 1e300):
        assert (await client.post(CHAT, json=chat_body(top_k=wrong))).status_code == 400


async def test_a_negative_top_k_is_vllms_for_all_tokens(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await client.post(CHAT, json=chat_body(top_k=-1))).status_code == 200
    assert engine.requests[0].params.top_k == 0


WANTED = {
    "skip_special_tokens": False,
    "length_penalty": 1.5,
    "audio": {"voice": "alloy"},
    "functions": [{"name": "f"}],
    "modalities": ["audio"],
    "store": 0,  # neutral would be false: 0 is of the wrong type
    "reasoning_effort": "high",
}


@pytest.mark.parametrize(("name", "value"), WANTED.items())
async def test_a_parameter_that_is_not_honoured_is_refused_by_name(client: httpx.AsyncClient, name: str, value: Any) -> None:
    assert_error(await client.post(CHAT, json=chat_body(**{name: value})), 400, name, "unsupported_parameter")


@pytest.mark.parametrize(("name", "value"), [("suffix", "end"), ("prompt_logprobs", 1), ("prediction", {"type": "content"})])
async def test_completions_refuse_what_they_do_not_honour(client: httpx.AsyncClient, name: str, value: Any) -> None:
    assert_error(await client.post(TEXT, json={"prompt": "Hi", name: value}), 400, name, "unsupported_parameter")


@pytest.mark.parametrize(("path", "known"), [(CHAT, parameters.CHAT), (TEXT, parameters.COMPLETION)])
async def test_neutral_values_and_parameters_without_effect_are_accepted(
    client: httpx.AsyncClient, path: str, known: dict[str, tuple[Any, ...]]
) -> None:
    neutral = {name: values[0] if values else None for name, values in known.items()}  # "anything" stands for itself
    body = neutral | {"user": "u", "metadata": {"a": "b"}, "n": 1, "temperature": None, "stop": None, "stream_options": None}
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ("", "invalid_value"),
        (["a", ""], "invalid_value"),
        ([], "invalid_value"),
        ([[]], "invalid_type"),
        ([1, "a"], "invalid_type"),
        ([True], "invalid_type"),
        ([1.5], "invalid_type"),
        ({"text": "a"}, "invalid_type"),
        (None, "invalid_type"),
        ([256], "invalid_value"),
        ([[1], [-1]], "invalid_value"),
        ("\ud800", "invalid_value"),
    ],
)
async def test_a_wrong_prompt_is_a_400_that_names_it(client: httpx.AsyncClient, prompt: Any, code: str) -> None:
    assert_error(await client.post(TEXT, content=json.dumps({"prompt": prompt})), 400, "prompt", code)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"{not json", "invalid_json"),
        (b"", "invalid_json"),
        (b'{"messages": "\xff"}', "invalid_json"),
        (b"[1]", "invalid_type"),
        (b'"text"', "invalid_type"),
        (b"null", "invalid_type"),
        (b"[" * 100_000, "invalid_json"),
    ],
)
async def test_a_body_that_is_no_json_object_is_a_400(client: httpx.AsyncClient, content: bytes, code: str) -> None:
    response = await client.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert_error(response, 400, None, code)


async def test_nan_is_not_a_temperature(client: httpx.AsyncClient) -> None:
    content = b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": NaN}'
    response = await client.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert_error(response, 400, "temperature", "invalid_value")


async def test_a_form_is_told_to_be_json(client: httpx.AsyncClient) -> None:
    error = assert_error(await client.post(CHAT, data={"model": "tiny"}), 400, None, "invalid_type")
    assert "Content-Type: application/json" in error["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_an_unknown_model_is_a_404(client: httpx.AsyncClient, path: str) -> None:
    response = await client.post(path, json=chat_body(model="gpt-4") if path == CHAT else {"prompt": "a", "model": "gpt-4"})
    assert_error(response, 404, "model", "model_not_found")


async def test_an_error_can_quote_what_utf8_cannot_hold(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, content=json.dumps(chat_body(model="\ud800")))
    assert "\ud800" in assert_error(response, 404, "model", "model_not_found")["message"]


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "multipart/form-data", "application/x-www-form-urlencoded", "application/xml", "application/octet-stream", "?"],
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize"])
async def test_a_body_that_is_not_said_to_be_json_is_told_to_be(client: httpx.AsyncClient, path: str, content_type: str) -> None:
    response = await client.post(path, content=json.dumps(chat_body()), headers={"Content-Type": content_type})
    assert "application/json" in assert_error(response, 400, None, "invalid_type")["message"]


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "application/vnd.api+json", None])
async def test_other_names_of_json_and_none_are_fine(client: httpx.AsyncClient, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    assert (await client.post(CHAT, content=json.dumps(chat_body()), headers=headers)).status_code == 200


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "PROPFIND"])
@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/nothing", "/v1/chat/completions/", "/a%0Ab%22%00é"])
async def test_routes_that_do_not_exist(client: httpx.AsyncClient, method: str, path: str) -> None:
    error = assert_error(await client.request(method, path), 404, None, "not_found")
    assert error["message"].startswith(f"There is no such route: {method} /")
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [(method, path, "POST") for path in (CHAT, TEXT, "/tokenize", "/detokenize") for method in ("GET", "PUT", "DELETE", "OPTIONS")]
    + [
        (method, path, "GET, HEAD")
        for path in ("/", "/v1/models", "/v1/models/tiny", "/health", "/ready", "/metrics", "/version", "/openapi.json")
        for method in ("POST", "PATCH", "DELETE", "OPTIONS", "PROPFIND")
    ]
    + [("PUT", "/v1/responses/resp_1", "DELETE, GET, HEAD")],
)
async def test_methods_that_a_route_does_not_take(client: httpx.AsyncClient, method: str, path: str, allowed: str) -> None:
    response = await client.request(method, path)
    error = assert_error(response, 405, None, "method_not_allowed")
    assert response.headers["allow"] == allowed
    assert f"{method} {path}" in error["message"]


@pytest.mark.parametrize(
    "path", ["/", "/v1/models", "/v1/models/tiny", "/health", "/ready", "/version", "/openapi.json", "/metrics"]
)
async def test_head_is_get_without_a_body(client: httpx.AsyncClient, path: str) -> None:
    asked, told = await client.get(path), await client.head(path)
    assert told.status_code == 200
    assert told.content == b""
    assert told.headers["content-type"] == asked.headers["content-type"]
    # Metrics of the process are others at each look.
    assert path == "/metrics" or told.headers["content-length"] == asked.headers["content-length"]


@pytest.mark.parametrize(("path", "status"), [(CHAT, 405), ("/v1/nothing", 404), ("/v1/models/gpt-4", 404)])
async def test_head_fails_as_get_does(client: httpx.AsyncClient, path: str, status: int) -> None:
    response = await client.head(path)
    assert (response.status_code, response.content) == (status, b"")


@pytest.mark.parametrize("stream", [False, True])
async def test_loading_is_a_503_that_asks_to_come_back(client: httpx.AsyncClient, engine: FakeEngine, stream: bool) -> None:
    engine.ready = False
    response = await client.post(CHAT, json=chat_body(stream=stream))
    assert_error(response, 503, None, "service_unavailable")
    assert int(response.headers["retry-after"]) > 0


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RuntimeError("secret path /etc"), 500, "internal_error"),
        (EngineNotReadyError("draining"), 503, "service_unavailable"),
        (ServerTimeoutError("longer than 20 seconds"), 408, "request_timeout"),
    ],
)
async def test_an_engine_that_fails(
    client: httpx.AsyncClient, engine: FakeEngine, error: Exception, status: int, code: str
) -> None:
    engine.error = error
    response = await client.post(CHAT, json=chat_body())
    assert_error(response, status, None, code)
    assert "secret" not in response.text


@pytest.mark.parametrize(("finish", "status"), [("error", 500), ("abort", 503)])
async def test_a_request_that_the_engine_gives_up(client: httpx.AsyncClient, engine: FakeEngine, finish: str, status: int) -> None:
    engine.finish = finish
    code = {500: "internal_error", 503: "service_unavailable"}[status]
    assert_error(await client.post(CHAT, json=chat_body()), status, None, code)
