"""Traces, as a real OTLP/HTTP receiver gets them."""

from __future__ import annotations

import builtins
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from app.main import create_app
from app.settings import Settings, SettingsError
from app.tracing import traces_url
from speculative.errors import EngineStepError
from tests.app.fakes import FakeEngine, chat_body

proto = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="needs OpenTelemetry: pip install 'moaserve[otel]'"
)
pytest.importorskip("opentelemetry.sdk", reason="needs OpenTelemetry: pip install 'moaserve[otel]'")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "tell nobody of this"


class Collector:
    """An OTLP/HTTP receiver that keeps what it gets."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, bytes]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.requests.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def resources(self) -> list[Any]:
        messages = [proto.ExportTraceServiceRequest.FromString(body) for _, body in self.requests]
        return [resource for message in messages for resource in message.resource_spans]

    def spans(self) -> list[Any]:
        return [span for resource in self.resources() for scope in resource.scope_spans for span in scope.spans]


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [plain(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def attributes_of(span: Any) -> dict[str, Any]:
    return {attribute.key: plain(attribute.value) for attribute in span.attributes}


async def ask(collector: Collector, engine: FakeEngine, path: str, body: dict[str, Any], **headers: str) -> None:
    """One request to an application that sends its traces there; they have arrived when this returns."""
    app = create_app(Settings(otlp_traces_endpoint=collector.url), engine)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        await client.post(path, json=body, headers=headers)


async def test_a_request_is_a_span_of_its_callers_trace(collector: Collector, engine: FakeEngine) -> None:
    before = time.time_ns()
    body = chat_body(messages=[{"role": "user", "content": SECRET}], temperature=0.5, max_tokens=20, seed=7, stop=[SECRET])
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-ID": "mine"}
    await ask(collector, engine, "/v1/chat/completions", body, **headers)
    after = time.time_ns()

    assert {path for path, _ in collector.requests} == {"/v1/traces"}
    resource = {each.key: plain(each.value) for each in collector.resources()[0].resource.attributes}
    assert resource["service.name"] == "moaserve"
    root, *phases = sorted(collector.spans(), key=lambda span: span.name != "chat tiny")
    assert root.name == "chat tiny"
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.kind) == (TRACE, PARENT, 2)
    assert before <= root.start_time_unix_nano <= root.end_time_unix_nano <= after
    # The engine in memory: 125 ms in the queue, as long for the prompt, two steps of half a second.
    seconds = {span.name: (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for span in phases}
    assert seconds == pytest.approx({"queue": 0.125, "prefill": 0.125, "decode": 1.0}, abs=1e-5)
    assert {(span.trace_id.hex(), span.parent_span_id) for span in phases} == {(TRACE, root.span_id)}
    attributes = attributes_of(root)
    told = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.seed": 7,
        "gen_ai.request.id": "mine",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": len(SECRET) + 1,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.prompt_tokens": len(SECRET) + 1,
        "gen_ai.usage.cache_read.input_tokens": len(SECRET),
        "gen_ai.latency.time_in_queue": 0.125,
        "gen_ai.latency.time_to_first_token": 0.25,
        "gen_ai.latency.time_in_model_decode": 1.0,
        "moaserve.speculative_decoding.mean_acceptance_length": 2.0,
        "moaserve.speculative_decoding.acceptance_histogram": [1, 1, 1],
        "moaserve.speculative_decoding.num_draft_tokens": 12,
    }
    assert {name: attributes.get(name) for name in told} == told
    assert attributes["gen_ai.latency.e2e"] > 0


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/completions", {"prompt": SECRET}, "text_completion tiny"),
        ("/v1/responses", {"input": SECRET, "stream": True}, "chat tiny"),
        ("/v1/responses", {"input": SECRET, "background": True}, "chat tiny"),
        ("/v1/chat/completions", chat_body(messages=[{"role": "user", "content": SECRET}], n=2, stream=True), "chat tiny"),
    ],
)
async def test_no_span_holds_what_was_asked_or_answered(
    collector: Collector, engine: FakeEngine, path: str, body: dict[str, Any], name: str
) -> None:
    engine.script = ("my answer",)
    await ask(collector, engine, path, body, traceparent=f"00-{TRACE}-{PARENT}-01")
    roots = [span for span in collector.spans() if span.parent_span_id.hex() == PARENT]
    assert [span.name for span in roots] == [name] * body.get("n", 1)
    everything = b"".join(body for _, body in collector.requests)
    assert SECRET.encode() not in everything
    assert b"my answer" not in everything


async def test_errors_are_told_by_their_kind_alone(collector: Collector, engine: FakeEngine) -> None:
    engine.error = EngineStepError(SECRET)
    await ask(collector, engine, "/v1/chat/completions", chat_body())
    (root,) = [span for span in collector.spans() if not span.parent_span_id]
    assert root.status.code == 2
    assert root.status.message == ""
    assert attributes_of(root)["error.type"] == "EngineStepError"
    assert attributes_of(root)["gen_ai.response.finish_reasons"] == ["error"]
    assert SECRET.encode() not in b"".join(body for _, body in collector.requests)


async def test_a_caller_that_does_not_sample_gets_no_spans(collector: Collector, engine: FakeEngine) -> None:
    await ask(collector, engine, "/v1/chat/completions", chat_body(), traceparent=f"00-{TRACE}-{PARENT}-00")
    assert collector.spans() == []


async def test_what_is_no_trace_context_begins_a_trace(collector: Collector, engine: FakeEngine) -> None:
    await ask(collector, engine, "/v1/chat/completions", chat_body(), traceparent="nonsense")
    assert [span.name for span in collector.spans() if not span.parent_span_id] == ["chat tiny"]


async def test_the_operators_name_of_the_service_wins(
    collector: Collector, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llm-eu")
    await ask(collector, engine, "/v1/chat/completions", chat_body())
    resource = {each.key: plain(each.value) for each in collector.resources()[0].resource.attributes}
    assert resource["service.name"] == "llm-eu"


async def test_a_collector_that_is_away_costs_no_request(
    collector: Collector, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.2")
    collector.close()
    app = create_app(Settings(otlp_traces_endpoint=collector.url), engine)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.post("/v1/chat/completions", json=chat_body())).status_code == 200
    app.state.serving.tracing.shutdown()  # neither does it keep the server from ending


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError("No module named 'opentelemetry'")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SettingsError, match=r"otlp_traces_endpoint needs .*pip install 'moaserve\[otel\]'"):
        create_app(Settings(otlp_traces_endpoint="http://localhost:4318"), engine)
    create_app(Settings(), engine)  # nobody else needs it


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "http://", ""])
def test_what_is_no_collectors_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="OTLP/HTTP collector"):
        Settings(otlp_traces_endpoint=endpoint)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
        ("https://otel.example.org/otlp/v1/traces", "https://otel.example.org/otlp/v1/traces"),
    ],
)
def test_a_collectors_own_path_is_kept(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url
