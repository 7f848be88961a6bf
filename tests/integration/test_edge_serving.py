"""`moaserve edge` beside the `moaserve serve` that verifies for it: the same answers, whatever becomes of the line between them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.integration.conftest import Server, start_server, stop_server
from tests.integration.edges import ask, chunks, comparable, failing, port_of, running_edge, text_of, until
from tests.integration.wire import Wire

pytestmark = pytest.mark.integration

QUESTION = [{"role": "user", "content": "Tell me about Berlin."}]
LONG: dict[str, Any] = {"messages": QUESTION, "max_tokens": 400, "ignore_eos": True, "temperature": 0.6, "seed": 11}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture
def wire(target: Server) -> Iterator[Wire]:
    wire = Wire(port_of(target))
    yield wire
    wire.close()


@pytest.fixture(scope="module")
def edge(target: Server, bundle: Path) -> Iterator[Server]:
    with running_edge(bundle, port_of(target)) as server:
        yield server


@pytest.fixture(scope="module")
def whole(target: Server) -> str:
    """What a server answers to LONG."""
    text: str = ask(target, LONG)["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize(
    "extra",
    [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.0, "seed": 2, "top_p": 0.9, "top_k": 40, "frequency_penalty": 0.6, "logit_bias": {"300": 2}},
        {"temperature": 0.7, "seed": 3, "stop": [" the", "\n"], "min_tokens": 4},
        {"temperature": 0.7, "seed": 4, "logprobs": True, "top_logprobs": 3},
        {"temperature": 0.9, "seed": 5, "n": 3},
        {"temperature": 0.6, "seed": 6, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"temperature": 0.6, "seed": 7, "tools": [WEATHER], "tool_choice": "required"},
        {"temperature": 0, "prediction": {"type": "content", "content": "Berlin is the capital of Germany. I can book a table."}},
        {"temperature": 0, "speculative": False, "max_tokens": 12},
        {"temperature": 0.5, "seed": 8, "max_tokens": 1},
    ],
)
def test_answers_are_the_servers_own(target: Server, edge: Server, extra: dict[str, Any]) -> None:
    body = {"messages": QUESTION, "max_tokens": 60, **extra}
    here = ask(edge, body)
    assert comparable(here) == comparable(ask(target, body))
    metrics = here["metrics"]
    assert metrics["edge"]["num_server_calls"] > 0 and min(metrics["edge"]["bytes_received"], metrics["edge"]["bytes_sent"]) > 50
    assert metrics["edge"]["offline_tokens"] == metrics["edge"]["corrected_tokens"] == 0


def test_what_is_drafted_while_a_tree_is_under_way_changes_no_answer(target: Server, bundle: Path) -> None:
    """Far from its server an edge has the time for it."""
    wire = Wire(port_of(target), delay=0.1)
    try:
        with running_edge(bundle, wire.port, "--draft-nodes", "24") as edge:
            bodies = [{"messages": QUESTION, "max_tokens": 64, "temperature": t, "seed": 1} for t in (0, 0.3, 0.8)]
            here = [ask(edge, body) for body in bodies]
    finally:
        wire.close()
    for answer, body in zip(here, bodies, strict=True):
        assert comparable(answer) == comparable(ask(target, body))
    costs = [answer["metrics"]["edge"] for answer in here]
    assert 0 < sum(cost["num_calls_ahead"] for cost in costs) < sum(cost["num_server_calls"] for cost in costs)


@pytest.mark.parametrize("path", ["completions", "responses"])
def test_other_apis_answer_alike(target: Server, edge: Server, path: str) -> None:
    whole = {"prompt": "Once upon a time", "echo": True, "logprobs": 1}
    body: dict[str, Any] = {"completions": whole, "responses": {"input": "What is Rome?"}}[path]
    limit = {"completions": "max_tokens", "responses": "max_output_tokens"}[path]
    answers = [ask(server, {**body, limit: 24, "temperature": 0}, path) for server in (edge, target)]
    if path == "completions":
        assert comparable(answers[0]) == comparable(answers[1])
    else:
        texts = [answer["output"][0]["content"][0]["text"] for answer in answers]
        assert texts[0] == texts[1] and answers[0]["usage"] == answers[1]["usage"]


def test_openais_own_client_streams_from_an_edge(target: Server, edge: Server) -> None:
    texts = []
    for server in (edge, target):
        client = openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)
        stream = client.chat.completions.create(
            model=client.models.list().data[0].id, messages=QUESTION, temperature=0.9, seed=9, stream=True, max_tokens=80
        )  # type: ignore[call-overload]
        texts.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))
        client.close()
    assert texts[0] and texts[0] == texts[1]


def test_an_edge_tells_how_its_link_is(edge: Server) -> None:
    ask(edge, {"messages": QUESTION, "max_tokens": 8})
    assert edge.metric("moaserve_edge_server_up") == 1
    assert edge.metric("moaserve_edge_bytes_total") > 0 and edge.metric("moaserve_edge_round_trip_seconds") > 0
    assert edge.metric("moaserve_request_server_calls_count") > 0
    assert httpx.get(f"{edge.root_url}/ready").status_code == 200
    assert "MoA Serve" in httpx.get(f"{edge.root_url}/").text


def test_a_client_that_leaves_ends_its_session(target: Server, edge: Server) -> None:
    until(lambda: target.metric("moaserve_remote_sessions") == 0)
    stream = chunks(edge, {**LONG, "max_tokens": 1500})
    next(stream)
    until(lambda: target.metric("moaserve_remote_sessions") == 1)
    stream.close()  # type: ignore[attr-defined]
    until(lambda: target.metric("moaserve_remote_sessions") == 0)


@pytest.mark.parametrize("how", ["cut", "silence"])
def test_a_text_goes_on_where_its_connection_was_lost(target: Server, bundle: Path, wire: Wire, whole: str, how: str) -> None:
    resumed = target.metric("moaserve_remote_resumes_total")
    with running_edge(bundle, wire.port, "--reconnect-timeout", "60", "--offline", "stop") as edge:
        stream = chunks(edge, LONG)
        told = [next(stream) for _ in range(4)]
        getattr(wire, how)()
        until(lambda: edge.metric("moaserve_edge_server_up") == 0)
        wire.mend()
        told += stream
        assert text_of(told) == whole
        assert edge.metric("moaserve_edge_reconnects_total") == 1
    assert target.metric("moaserve_remote_resumes_total") == resumed + 1


def test_a_text_outlives_its_server(bundle: Path, whole: str) -> None:
    first = start_server("--dtype", "float32", "--num-threads", "1")
    port = port_of(first)
    with running_edge(bundle, port, "--reconnect-timeout", "60", "--offline", "stop") as edge:
        stream = chunks(edge, LONG)
        told = [next(stream) for _ in range(4)]
        first.process.kill()
        stop_server(first)
        second = start_server("--dtype", "float32", "--num-threads", "1", port=port)
        try:
            told += stream
            assert text_of(told) == whole
        finally:
            stop_server(second)


def cut_off(edge: Server, wire: Wire, body: dict[str, Any], offline: int = 5) -> list[Any]:
    """The chunks of an answer during which the line was cut until some were written offline."""
    stream = chunks(edge, body)
    told = [next(stream) for _ in range(4)]
    wire.cut()
    while sum("edge" in chunk for chunk in told) < offline:
        told.append(next(stream))
    wire.mend()
    return told + list(stream)


def test_what_was_written_offline_is_corrected(bundle: Path, wire: Wire, whole: str) -> None:
    with running_edge(bundle, wire.port, "--reconnect-timeout", "0") as edge:
        told = cut_off(edge, wire, LONG)
        assert text_of(told) == whole
        offline = [chunk for chunk in told if chunk.get("edge", {}).get("offline")]
        counted = told[-1]["metrics"]["edge"]
        assert counted["offline_tokens"] == len(offline) >= 5
        assert (counted["corrected_tokens"] > 0) == any("replace_from" in chunk.get("edge", {}) for chunk in told)
        assert edge.metric("moaserve_edge_offline_tokens_total") == counted["offline_tokens"]


def test_what_was_written_offline_stays(bundle: Path, wire: Wire, whole: str) -> None:
    with running_edge(bundle, wire.port, "--reconnect-timeout", "0", "--offline", "keep") as edge:
        told = cut_off(edge, wire, LONG)
        assert not any("replace_from" in chunk.get("edge", {}) for chunk in told)
        first = next(place for place, chunk in enumerate(told) if "edge" in chunk)
        assert whole.startswith(text_of(told[:first]))
        assert told[-1]["choices"][0]["finish_reason"] == "length"
        assert "edge" not in told[-2], "the server has written the end"


def test_an_answer_ends_where_it_may_not_go_on_alone(bundle: Path, wire: Wire) -> None:
    with running_edge(bundle, wire.port, "--reconnect-timeout", "0", "--offline", "stop") as edge:
        stream = chunks(edge, LONG)
        next(stream)
        wire.cut()
        *_, last = stream
        # Cut off from it, or, where an attempt to reconnect has come first, that it cannot be reached.
        assert last["error"]["code"] == "service_unavailable" and f"ws://127.0.0.1:{wire.port}" in last["error"]["message"]
        refused = httpx.post(f"{edge.base_url}/chat/completions", json=LONG)
        assert refused.status_code == 503 and "ws://127.0.0.1" in refused.json()["error"]["message"]


def test_an_edge_answers_before_it_has_seen_its_server(target: Server, bundle: Path, wire: Wire) -> None:
    wire.cut()
    with running_edge(bundle, wire.port, "--reconnect-timeout", "0") as edge:
        body = {**LONG, "max_tokens": 20}
        alone = ask(edge, body)
        assert alone["metrics"]["edge"]["offline_tokens"] == 20 and alone["metrics"]["edge"]["num_server_calls"] == 0
        wire.mend()
        until(lambda: edge.metric("moaserve_edge_server_up") == 1)
        assert comparable(ask(edge, body)) == comparable(ask(target, body))


def test_a_server_that_takes_no_such_edge_is_a_clear_error(target: Server, bundle: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(bundle, other)
    config = json.loads((other / "config.json").read_text("utf-8"))
    (other / "config.json").write_text(json.dumps({**config, "fingerprint": "another"}), "utf-8")
    said = failing(other, port_of(target))
    assert "export the bundle anew" in said and "cannot load" not in said, "the bundle is not at fault"
    locked = start_server("--dtype", "float32", "--num-threads", "1", "--api-key", "right")
    try:
        assert "MOASERVE_SERVER_API_KEY" in failing(bundle, port_of(locked), MOASERVE_SERVER_API_KEY="wrong")
    finally:
        stop_server(locked)
