"""Large bodies and texts: read as small ones are, off the event loop, and refused early where they cannot fit."""

import asyncio
import inspect
import json
import re
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from app import bodies
from app.errors import InvalidParameterError
from app.responses_api.schemas import ResponseRequest
from app.schemas import ChatCompletionRequest, CompletionRequest, TokenizeRequest
from app.tokens import check_length
from speculative.errors import ContextLengthError
from speculative.request import Request, RequestOutput
from tests.app.fakes import CONTEXT, FakeEngine, FakeTokenizer, chat_body, events

CHAT, TEXT, TOKENIZE, RESPONSES = "/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/responses"
LARGE = {"metadata": {f"key {number}": "x" * 100 for number in range(1000)}}
assert bodies.SMALL < len(json.dumps(LARGE)) < bodies.SIMPLE
LARGER = {"metadata": {f"key {number}": "x" * 100 for number in range(2000)}}
assert len(json.dumps(LARGER)) > bodies.SIMPLE


@dataclass
class Paused(FakeEngine):
    """Holds its first answer after the first output until it is let go on."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        held = not self.requests
        async for output in super().generate(request):
            yield output
            if held:
                self.begun.set()
                await self.go.wait()


@pytest.fixture
def engine() -> Paused:
    return Paused()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
@settings(deadline=None)
def test_a_large_text_is_read_as_a_small_one(value: Any) -> None:
    text = json.dumps(value).encode()
    padded = text + b" " * bodies.SIMPLE
    assert bodies.parse(padded) == json.loads(text) == value


@pytest.mark.parametrize("text", [b"", b"{", b"[1,]", b'{"a" 1}', b'"\n"', b"[1]]", b"nul", b'{"a":1,}'])
def test_what_is_no_json_is_none_when_it_is_large(text: bytes) -> None:
    with pytest.raises(json.JSONDecodeError):
        bodies.parse(text + b" " * bodies.SIMPLE)


@pytest.mark.parametrize(
    ("body", "most", "what"),
    [
        ('{"a":[%s]}', bodies.MOST_CONTAINERS - 2, "[]"),
        ('{"a":[%s]}', bodies.MOST_CONTAINERS - 2, "{}"),
        ('{"a":[%s]}', bodies.MOST_CONTAINERS // 2 - 1, '{"a":[1]}'),
        ("{%s}", bodies.MOST_KEYS, '"a":1'),
        ("[%s]", bodies.MOST_VALUES, "1"),
        ("[%s]", bodies.MOST_VALUES, '"a"'),
    ],
)
def test_a_text_of_very_many_values_is_refused_unread(body: str, most: int, what: str) -> None:
    assert bodies.counted((body % ",".join([what] * most)).encode())
    with pytest.raises(InvalidParameterError, match="The request body has more than"):
        bodies.counted((body % ",".join([what] * (most + 1))).encode())


@given(JSON, st.integers(1, 20))
@settings(deadline=None)
def test_what_stands_in_strings_is_not_counted(value: Any, stretch: int) -> None:
    text = json.dumps(value, ensure_ascii=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "_STRETCH", stretch)
        assert "".join(bodies._outside_of_strings(text)) == re.sub(r'"(?:[^"\\]|\\.)*"', "", text, flags=re.DOTALL)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
async def test_a_text_of_very_many_commas_and_brackets_is_answered(
    client: httpx.AsyncClient, engine: Paused, encoding: str
) -> None:
    engine.go.set()
    body = chat_body(metadata={"a": '\\",:[{∀' * bodies.MOST_CONTAINERS})
    text = json.dumps(body, ensure_ascii=False).encode(encoding)
    assert bodies.counted(text)[1] < 20
    response = await client.post(CHAT, content=text, headers={"Content-Type": "application/json"})
    assert response.status_code == 200


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, TOKENIZE, "/detokenize"])
async def test_very_many_values_are_a_400(client: httpx.AsyncClient, path: str) -> None:
    text = f'{{"prompt":[{"5," * bodies.MOST_VALUES}5]}}'
    response = await client.post(path, content=text, headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "invalid_value")
    assert error["message"] == f"The request body has more than {bodies.MOST_VALUES} values."


async def test_a_body_of_few_values_does_not_wait_for_one_of_many(
    client: httpx.AsyncClient, engine: Paused, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.go.set()
    gate = Gate()
    monkeypatch.setattr(bodies, "parse", gate.around(bodies.parse, lambda given: given[:7] == '{"slow"'))
    many = asyncio.create_task(client.post(CHAT, json={"slow": [5] * 100_000}))
    try:
        assert await asyncio.to_thread(gate.entered.wait, 5)
        for padding in (LARGE, LARGER):
            answered = await asyncio.wait_for(client.post(CHAT, json=chat_body() | padding), 30)
            assert answered.status_code == 200
        assert not many.done()
    finally:
        gate.opened.set()
    assert (await asyncio.wait_for(many, 30)).json()["error"]["param"] == "messages"


KINDS: dict[str, type[BaseModel]] = {
    CHAT: ChatCompletionRequest,
    TEXT: CompletionRequest,
    TOKENIZE: TokenizeRequest,
    RESPONSES: ResponseRequest,
}
UNKNOWN = {f"nonsense {number}": 0 for number in range(10_000)}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (CHAT, chat_body() | UNKNOWN, "nonsense 0", "unknown_parameter"),
        (TEXT, {"prompt": "a"} | UNKNOWN, "nonsense 0", "unknown_parameter"),
        (RESPONSES, {"input": "a"} | UNKNOWN, "nonsense 0", "unknown_parameter"),
        (CHAT, chat_body(tools=[TOOL | UNKNOWN]), "tools[0].nonsense 0", "unknown_parameter"),
        (CHAT, chat_body(tools=[5] * 10_000), "tools[0]", "invalid_type"),
        (CHAT, chat_body(guided_choice=[5] * 10_000), "guided_choice[0]", "invalid_type"),
        (CHAT, chat_body(stop_token_ids=["a"] * 10_000), "stop_token_ids[0]", "invalid_type"),
        (CHAT, chat_body(metadata={"a": "b"} | UNKNOWN), "metadata.nonsense 0", "invalid_type"),
        (RESPONSES, {"input": "a", "metadata": UNKNOWN}, "metadata", "invalid_value"),
        (CHAT, chat_body(logit_bias=dict.fromkeys(map(str, range(10_000)), "a")), "logit_bias", "invalid_value"),
        (CHAT, chat_body(chat_template_kwargs=UNKNOWN), "chat_template_kwargs", "invalid_value"),
        (TOKENIZE, chat_body(chat_template_kwargs=UNKNOWN), "chat_template_kwargs", "invalid_value"),
    ],
)
async def test_of_very_many_problems_one_is_looked_for(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str, code: str
) -> None:
    response = await client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"], response.json()["error"]["code"]) == (400, param, code)
    with pytest.raises(ValidationError) as refused:
        KINDS[path].model_validate(body)
    assert refused.value.error_count() == 1


@pytest.mark.parametrize(("path", "body"), [(CHAT, chat_body()), (TEXT, {"prompt": "a"}), (RESPONSES, {"input": "a"})])
@pytest.mark.parametrize("name", ["cache_salt", "prompt_cache_key", "user", "safety_identifier"])
async def test_what_tells_requests_apart_is_short(
    client: httpx.AsyncClient, engine: Paused, path: str, body: dict[str, Any], name: str
) -> None:
    engine.go.set()
    assert (await client.post(path, json=body | {name: "a" * 1024})).status_code == 200
    error = (await client.post(path, json=body | {name: "a" * 1025})).json()["error"]
    assert error["message"] == f"Invalid value for '{name}': String should have at most 1024 characters."


@pytest.mark.parametrize("padding", [LARGE, LARGER])
async def test_a_large_body_is_answered_as_a_small_one(client: httpx.AsyncClient, engine: Paused, padding: Any) -> None:
    engine.go.set()
    for path, body in [(CHAT, chat_body()), (TEXT, {"prompt": "ab"})]:
        assert (await client.post(path, json=body | padding)).json()["usage"]["completion_tokens"] == 3
        assert (await client.post(path, json=body)).json()["usage"]["completion_tokens"] == 3
    chat, _, text, _ = engine.requests
    assert (chat.prompt_token_ids, text.prompt_token_ids) == ((72, 105, 0), (97, 98))


@pytest.mark.parametrize("padding", [{}, LARGE, LARGER])
@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (CHAT, chat_body(temperature="1"), "temperature", "invalid_type"),
        (CHAT, chat_body(messages=[{"role": "user", "content": "Hi"}, {"role": "king"}]), "messages[1].role", "invalid_value"),
        (CHAT, chat_body(logit_bias={"5": 101}), "logit_bias[5]", "invalid_value"),
        (CHAT, chat_body(nonsense=1), "nonsense", "unknown_parameter"),
        (TEXT, {"prompt": [1, "a"]}, "prompt", "invalid_type"),
        (TEXT, {}, "prompt", "missing_required_parameter"),
    ],
)
async def test_the_size_of_a_body_changes_no_refusal(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str, code: str, padding: Any
) -> None:
    response = await client.post(path, json=body | padding)
    assert (response.status_code, response.json()["error"]["param"], response.json()["error"]["code"]) == (400, param, code)


@pytest.mark.parametrize("size", [bodies.SMALL, bodies.SIMPLE])
@pytest.mark.parametrize("broken", [b'{"a": ', b"[" * 5000, b'"\xff"'])
async def test_a_large_body_that_is_no_json_is_refused(client: httpx.AsyncClient, broken: bytes, size: int) -> None:
    response = await client.post(CHAT, content=broken + b" " * size, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


class Gate:
    """Holds a thread up: ``entered`` once it is there, until ``opened``."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def around(self, work: Callable[..., Any], held: Callable[..., bool]) -> Callable[..., Any]:
        def waiting(*arguments: Any, **named: Any) -> Any:
            if held(*arguments):
                self.entered.set()
                assert self.opened.wait(10)
            return work(*arguments, **named)

        return waiting


async def _amid_a_stream(client: httpx.AsyncClient, engine: Paused, gate: Gate, path: str, body: dict[str, Any]) -> httpx.Response:
    """The answer to a request that is held up in a thread while a stream goes on and ends."""
    streaming = asyncio.create_task(client.post(CHAT, json=chat_body(stream=True)))
    await asyncio.wait_for(engine.begun.wait(), 30)
    held_up = asyncio.create_task(client.post(path, json=body))
    try:
        assert await asyncio.to_thread(gate.entered.wait, 5)
        engine.go.set()
        stream = await asyncio.wait_for(streaming, 30)
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in events(stream)) == "Hello, world"
        assert not held_up.done()
    finally:
        gate.opened.set()
    return await asyncio.wait_for(held_up, 30)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat_body(messages=[{"role": "user", "content": "slow"}])),
        (RESPONSES, {"input": "slow"}),
        (TOKENIZE, {"messages": [{"role": "user", "content": "slow"}]}),
    ],
)
async def test_a_stream_goes_on_while_a_prompt_is_rendered(
    client: httpx.AsyncClient, engine: Paused, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    gate, tokenizer = Gate(), engine.tokenizer
    slow = gate.around(tokenizer.apply_chat_template, lambda messages: messages[0]["content"] == "slow")
    # The parameters of the method are looked at: a template's variables may not be named as they are.
    slow.__signature__ = inspect.signature(tokenizer.apply_chat_template)  # type: ignore[attr-defined]
    monkeypatch.setattr(tokenizer, "apply_chat_template", slow)
    assert (await _amid_a_stream(client, engine, gate, path, body)).status_code == 200


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [("encode", TEXT, {"prompt": "slow"}), ("encode", TOKENIZE, {"prompt": "slow"}), ("decode", "/detokenize", {"tokens": [97]})],
)
async def test_a_stream_goes_on_while_texts_are_tokenized_and_put_together(
    client: httpx.AsyncClient, engine: Paused, monkeypatch: pytest.MonkeyPatch, name: str, path: str, body: dict[str, Any]
) -> None:
    gate = Gate()
    monkeypatch.setattr(engine.tokenizer, name, gate.around(getattr(engine.tokenizer, name), lambda given: given in ("slow", [97])))
    assert (await _amid_a_stream(client, engine, gate, path, body)).status_code == 200


async def test_a_stream_goes_on_while_a_large_body_is_read(
    client: httpx.AsyncClient, engine: Paused, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    monkeypatch.setattr(bodies, "parse", gate.around(bodies.parse, lambda _: True))
    assert (await _amid_a_stream(client, engine, gate, CHAT, chat_body() | LARGE)).status_code == 200


async def test_a_stream_goes_on_while_log_probabilities_are_told(
    client: httpx.AsyncClient, engine: Paused, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app.completions import CompletionWriter

    gate = Gate()
    monkeypatch.setattr(CompletionWriter, "whole", gate.around(CompletionWriter.whole, lambda *_: True))
    answer = await _amid_a_stream(client, engine, gate, TEXT, {"prompt": "ab", "logprobs": 1})
    assert len(answer.json()["choices"][0]["logprobs"]["tokens"]) == 3


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a" * 900}] * 2}, "messages"),
        (TEXT, {"prompt": "a" * 1_000_000}, "prompt"),
        (RESPONSES, {"input": "a" * 1_000_000}, "input"),
        (TOKENIZE, {"prompt": "a" * 1_000_000}, "prompt"),
        (TOKENIZE, {"messages": [{"role": "user", "content": "a" * 900}] * 2}, "messages"),
    ],
)
async def test_a_text_that_is_far_too_long_is_refused_by_its_beginning(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
) -> None:
    encoded: list[int] = []
    encode = engine.tokenizer.encode

    def counting(text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(engine.tokenizer, "encode", counting)
    response = await client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded")
    assert f"maximum context length is {CONTEXT} tokens" in error["message"]
    assert encoded == [16 * CONTEXT]


@pytest.mark.parametrize("path", [CHAT, TOKENIZE])
async def test_more_messages_than_tokens_of_context_are_refused_unseen(
    client: httpx.AsyncClient, engine: FakeEngine, path: str
) -> None:
    response = await client.post(path, json=chat_body(messages=[{"role": "user", "content": ""}] * (CONTEXT + 1)))
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert engine.tokenizer.conversations == []


class Words(FakeTokenizer):
    """A word is a token, however long."""

    def encode(self, text: str, *, verbose: bool, add_special_tokens: bool) -> list[int]:
        return [0] * len(text.split())


def test_a_text_of_few_long_tokens_is_not_refused_for_its_length() -> None:
    check_length(Words(), "x" * 10_000, "prompt", most=10)
    check_length(Words(), f"{'x' * 200} y", "prompt", most=10)
    with pytest.raises(ContextLengthError):
        check_length(Words(), "x " * 10_000, "prompt", most=10)


def test_of_a_text_that_begins_with_long_tokens_no_more_is_read_than_says_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    words, read = Words(), []
    encode = words.encode
    monkeypatch.setattr(words, "encode", lambda text, **options: read.append(text) or encode(text, **options))
    with pytest.raises(ContextLengthError):
        check_length(words, "x" * 1_000 + " y" * 1_000_000, "prompt", most=10)
    assert sum(map(len, read)) < 1_000 + 3 * 160


class PanicError(BaseException):
    """As libraries in Rust raise it."""


async def test_a_tokenizer_that_panics_is_a_400(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(text: str, **options: Any) -> list[int]:
        raise PanicError("retry limit")

    monkeypatch.setattr(engine.tokenizer, "encode", panic)
    response = await client.post(TEXT, json={"prompt": "a"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert "retry limit" in response.json()["error"]["message"]


async def test_any_other_panic_is_an_error_as_all_others(
    client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(request: Any) -> None:
        raise PanicError("index out of bounds")

    monkeypatch.setattr(engine, "validate", panic)
    response = await client.post(TEXT, json={"prompt": "a"})
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")
    assert response.headers["x-request-id"]
    assert "bounds" not in response.text


async def test_a_prediction_is_read_as_far_as_a_context_can_hold_it(client: httpx.AsyncClient, engine: Paused) -> None:
    engine.go.set()
    content = "ab" * 10_000
    await client.post(CHAT, json=chat_body(prediction={"type": "content", "content": content}))
    assert engine.requests[0].prediction == tuple(content[: 16 * CONTEXT].encode())
