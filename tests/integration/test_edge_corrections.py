"""Answers of every kind during which the line to the server is cut: what a client ends up with is the server's own answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.app.reassembly import revised_tokens
from tests.integration.conftest import Server
from tests.integration.edges import ask, comparable, port_of, running_edge, until
from tests.integration.wire import Wire

pytestmark = pytest.mark.integration

MODEL = "concierge"

ALONE = 12
"""Tokens that an edge writes alone before its server is back."""

NOTES = {
    "type": "object",
    "properties": {
        "notes": {"type": "array", "items": {"type": "string", "minLength": 12, "maxLength": 24}, "minItems": 24, "maxItems": 24}
    },
    "required": ["notes"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Tell me about Berlin."}]
SAMPLED: dict[str, Any] = {"temperature": 0.6, "seed": 11}
LONG: dict[str, Any] = {**SAMPLED, "max_tokens": 300, "ignore_eos": True}
TOOL = {"type": "function", "function": {"name": "keep_notes", "parameters": NOTES, "strict": True}}
FORM = {"type": "json_schema", "json_schema": {"name": "notes", "schema": NOTES}}


@pytest.fixture(scope="module")
def wire(target: Server) -> Iterator[Wire]:
    wire = Wire(port_of(target))
    yield wire
    wire.close()


@pytest.fixture
def edge(target: Server, bundle: Path, wire: Wire) -> Iterator[Server]:
    """One for each test: an edge that was cut off again and again waits longer each time, and the answer could end alone."""
    with running_edge(bundle, wire.port, "--reconnect-timeout", "0") as edge:
        yield edge


@pytest.fixture
def client(edge: Server) -> Iterator[openai.OpenAI]:
    until(lambda: edge.metric("moaserve_edge_server_up") == 1)
    with openai.OpenAI(base_url=edge.base_url, api_key="none", max_retries=0) as client:
        yield client


def cut_off(edge: Server, wire: Wire) -> None:
    """Cut the line until the edge has written some tokens alone."""
    written = edge.metric("moaserve_edge_offline_tokens_total")
    wire.cut()
    until(lambda: edge.metric("moaserve_edge_offline_tokens_total") >= written + ALONE)
    wire.mend()


def interrupted(stream: Any, edge: Server, wire: Wire, begun: int = 4) -> list[Any]:
    """All that a stream has told, the line cut after its first events."""
    told = [next(stream) for _ in range(begun)]
    cut_off(edge, wire)
    return told + list(stream)


def extra(model: Any, name: str) -> Any:
    return (model.model_extra or {}).get(name)


def corrected(chunks: list[Any]) -> tuple[str, list[tuple[str, float]]]:
    """Text and log-probabilities as docs/edge.md says how to read them."""
    text, logprobs = "", []
    for chunk in chunks:
        note = extra(chunk, "edge") or {}
        if note.get("replace_from") is not None:
            text = text[: note["replace_from"]]
            del logprobs[note["replace_from_token"] :]
        for choice in chunk.choices:
            text += choice.delta.content or "" if hasattr(choice, "delta") else choice.text
            if choice.logprobs is None:
                continue
            if hasattr(choice, "delta"):
                logprobs += [(each.token, each.logprob) for each in choice.logprobs.content]
            else:
                logprobs += zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True)
    return text, logprobs


def assert_alike(told: list[tuple[str, float]], whole: list[tuple[str, float]], offline: int) -> None:
    """The same tokens, and the same log-probabilities but where the drafter's token stands because the server agrees."""
    assert [token for token, _ in told] == [token for token, _ in whole]
    others = sum(abs(one - other) > 1e-3 for (_, one), (_, other) in zip(told, whole, strict=True))
    assert others <= offline


def test_chat_with_log_probabilities(target: Server, edge: Server, wire: Wire, client: openai.OpenAI) -> None:
    body = {**LONG, "messages": QUESTION, "logprobs": True}
    whole = ask(target, body)["choices"][0]
    stream = client.chat.completions.create(model=MODEL, stream=True, extra_body=body, messages=[])
    told = interrupted(stream, edge, wire)
    text, logprobs = corrected(told)
    assert text == whole["message"]["content"]
    cost = extra(told[-1], "metrics")["edge"]
    assert cost["offline_tokens"] >= ALONE and cost["corrected_tokens"] > 0, "it had to be put right"
    expected = [(each["token"], each["logprob"]) for each in whole["logprobs"]["content"]]
    assert_alike(logprobs, expected, cost["offline_tokens"] - cost["corrected_tokens"])


def test_text_completions_with_log_probabilities(target: Server, edge: Server, wire: Wire, client: openai.OpenAI) -> None:
    body = {**LONG, "prompt": "Once upon a time", "logprobs": 1}
    whole = ask(target, body, "completions")["choices"][0]
    told = interrupted(client.completions.create(model=MODEL, stream=True, extra_body=body, prompt=""), edge, wire)
    text, logprobs = corrected(told)
    assert text == whole["text"]
    cost = extra(told[-1], "metrics")["edge"]
    assert cost["corrected_tokens"] > 0
    expected = list(zip(whole["logprobs"]["tokens"], whole["logprobs"]["token_logprobs"], strict=True))
    assert_alike(logprobs, expected, cost["offline_tokens"] - cost["corrected_tokens"])
    offsets = [chunk.choices[0].logprobs.text_offset for chunk in told if chunk.choices and chunk.choices[0].logprobs]
    assert offsets[-1] == whole["logprobs"]["text_offset"][-len(offsets[-1]) :]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_token_origins(target: Server, edge: Server, wire: Wire, client: openai.OpenAI, path: str) -> None:
    body = {**LONG, "return_token_origins": True, "stop": ["zzz", " of the zzz"]}
    if path == "completions":
        body |= {"prompt": "Once upon a time"}
        stream: Any = client.completions.create(model=MODEL, stream=True, extra_body=body, prompt="")
    else:
        body |= {"messages": QUESTION}
        stream = client.chat.completions.create(model=MODEL, stream=True, extra_body=body, messages=[])
    told = interrupted(stream, edge, wire)
    whole = ask(target, body, path)["choices"][0]["token_origins"]
    assert extra(told[-1], "metrics")["edge"]["corrected_tokens"] > 0
    tokens = revised_tokens(chunk.model_dump(exclude_unset=True) for chunk in told)
    assert texts_of(tokens) == texts_of(whole)


def texts_of(origins: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Without what differs from one time to the next: which tokens were drafted and accepted."""
    return [(token["index"], token["text"]) for token in origins]


def test_responses(target: Server, edge: Server, wire: Wire, client: openai.OpenAI) -> None:
    body = {**SAMPLED, "max_output_tokens": 300, "ignore_eos": True, "input": "Tell me about Berlin."}
    whole = ask(target, body, "responses")["output"][0]["content"][0]["text"]
    told = interrupted(client.responses.create(model=MODEL, stream=True, extra_body=body, input=""), edge, wire, begun=6)
    text = ""
    for event in told:
        if event.type == "response.output_text.delta":
            if (note := extra(event, "edge")) and note.get("replace_from") is not None:
                text = text[: note["replace_from"]]
            text += event.delta
    assert text == whole
    assert [event.text for event in told if event.type == "response.output_text.done"] == [whole]
    assert told[-1].response.output_text == whole
    assert extra(told[-1].response, "metrics")["edge"]["corrected_tokens"] > 0


def test_openais_helper_ends_up_with_the_response(target: Server, edge: Server, wire: Wire, client: openai.OpenAI) -> None:
    body = {**SAMPLED, "max_output_tokens": 300, "input": "Tell me about Berlin.", "min_tokens": 299}
    whole = ask(target, body, "responses")["output"][0]["content"][0]["text"]
    with client.responses.stream(model=MODEL, input="", extra_body=body) as stream:
        events = iter(stream)
        for _ in range(6):
            next(events)
        cut_off(edge, wire)
        ends = [event.response for event in events if event.type in ("response.completed", "response.incomplete")]
    assert [end.output_text for end in ends] == [whole]


def test_tools(target: Server, edge: Server, wire: Wire, client: openai.OpenAI) -> None:
    body = {**SAMPLED, "messages": QUESTION, "tools": [TOOL], "tool_choice": "required", "max_tokens": 900}
    whole = ask(target, body)["choices"][0]
    (right,) = whole["message"]["tool_calls"]
    stream = client.chat.completions.create(model=MODEL, stream=True, extra_body=body, messages=[])
    told = interrupted(stream, edge, wire)
    # A client that knows nothing of edges adds up what it is told.
    names, arguments, reasons = "", "", [chunk.choices[0].finish_reason for chunk in told]
    for chunk in told:
        for call in chunk.choices[0].delta.tool_calls or ():
            assert call.index == 0 and not (extra(chunk, "edge") or {}).get("offline")
            names += call.function.name or ""
            arguments += call.function.arguments or ""
    assert (names, arguments) == ("keep_notes", right["function"]["arguments"])
    assert reasons[-1] == whole["finish_reason"] == "tool_calls" and len(json.loads(arguments)["notes"]) == 24
    assert extra(told[-1], "metrics")["edge"]["corrected_tokens"] > 0


def test_structured_output(target: Server, edge: Server, wire: Wire, client: openai.OpenAI) -> None:
    body = {**SAMPLED, "messages": QUESTION, "response_format": FORM, "max_tokens": 900}
    whole = ask(target, body)["choices"][0]["message"]["content"]
    stream = client.chat.completions.create(model=MODEL, stream=True, extra_body=body, messages=[])
    told = interrupted(stream, edge, wire)
    assert not any(extra(chunk, "edge") for chunk in told)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in told) == whole
    assert extra(told[-1], "metrics")["edge"]["corrected_tokens"] > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {**LONG, "messages": QUESTION, "return_token_origins": True}),
        ("chat/completions", {**SAMPLED, "messages": QUESTION, "tools": [TOOL], "tool_choice": "required", "max_tokens": 900}),
        ("completions", {**LONG, "prompt": "Once upon a time", "n": 2}),
        ("responses", {**SAMPLED, "max_output_tokens": 300, "ignore_eos": True, "input": "Tell me about Berlin."}),
    ],
)
def test_whole_answers(target: Server, edge: Server, wire: Wire, client: openai.OpenAI, path: str, body: dict[str, Any]) -> None:
    sessions = target.metric("moaserve_remote_sessions")
    expected = ask(target, body, path)
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(ask, edge, body, path)
        until(lambda: target.metric("moaserve_remote_sessions") > sessions)
        until(lambda: edge.metric("moaserve_edge_bytes_total") > 0 and edge.metric("moaserve_generation_tokens_total") > 0)
        cut_off(edge, wire)
        here = asking.result()
    assert here["metrics"]["edge"]["corrected_tokens"] > 0, "it had to be put right, and there was time for that"
    if path == "responses":
        texts = [answer["output"][0]["content"][0]["text"] for answer in (here, expected)]
        assert texts[0] == texts[1]
    else:
        choices = [comparable(answer)[0] for answer in (here, expected)]
        for choice in (one for some in choices for one in some if "token_origins" in one):
            choice["token_origins"] = texts_of(choice["token_origins"])
        assert choices[0] == choices[1]
