"""OpenTelemetry traces: a span for each request, exported by a thread of its own. Never what was asked or answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit, urlunsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.logs import current_request_id
from app.recording import RequestRecorder
from app.settings import SettingsError
from speculative.request import Request, RequestStats

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

DEFAULT_PATH: Final = "/v1/traces"
SHUTDOWN_S: Final = 3.0
COMPLETIONS: Final = "/v1/completions"
TRACE_HEADERS: Final = ("traceparent", "tracestate")


@dataclass(frozen=True, slots=True)
class Caller:
    """What a request's span takes from its HTTP request: the trace that it belongs to, and the operation's name."""

    context: Context
    operation: str


current_caller: ContextVar[Caller | None] = ContextVar("current_caller", default=None)


class Tracing:
    """Sends spans to an OTLP/HTTP collector; names are those of OpenTelemetry's GenAI conventions, and beside them vLLM's.

    Sampling, batching, headers and the resource follow OpenTelemetry's own variables, such as ``OTEL_TRACES_SAMPLER``. A collector
    that is slow or away costs spans, never a request.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            message = f"otlp_traces_endpoint needs OpenTelemetry, which is not installed ({error}): pip install 'moaserve[otel]'"
            raise SettingsError(message) from error
        resource = Resource.create({"service.name": "moaserve", "service.version": version("moaserve")})
        self._provider: TracerProvider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()),  # OTEL_SERVICE_NAME wins
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=traces_url(endpoint))))
        self._tracer = self._provider.get_tracer("moaserve", version("moaserve"))

    def caller(self, path: str, headers: Mapping[str, str]) -> Caller:
        """Whose request this is, by its path and its W3C trace context."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        operation = "text_completion" if path.endswith(COMPLETIONS) else "chat"
        return Caller(TraceContextTextMapPropagator().extract(carrier), operation)

    def request(self, request: Request, model: str, recorder: RequestRecorder, error: Exception | None) -> None:
        """Tell of a request that has ended now; spans within it are its time in the queue, its prefill and its decoding."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        caller = current_caller.get() or self.caller("", {})
        ended = time.monotonic()
        epoch = time.time() - ended  # spans want the time of day, the engine keeps a monotonic clock

        def nanoseconds(moment: float) -> int:
            return int((epoch + moment) * 1e9)

        span = self._tracer.start_span(
            f"{caller.operation} {model}",
            caller.context,
            SpanKind.SERVER,
            attributes=_attributes(request, caller.operation, model, recorder, ended),
            start_time=nanoseconds(recorder.began),
        )
        if error is not None:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR))
        within = set_span_in_context(span)
        for name, since, until in _phases(recorder.stats):
            self._tracer.start_span(name, within, start_time=nanoseconds(since)).end(nanoseconds(until))
        span.end(nanoseconds(ended))

    def shutdown(self, timeout: float = SHUTDOWN_S) -> None:
        """Send what is left, and stop. Blocks, but not longer than ``timeout`` seconds: a collector may be away."""
        last = threading.Thread(target=self._provider.shutdown, name="moaserve-traces", daemon=True)
        last.start()
        last.join(timeout)


class TraceContext:
    """ASGI middleware: lets a request's spans know their caller's trace."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app, self._tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        token = current_caller.set(self._tracing.caller(scope["path"], Headers(scope=scope)))
        try:
            await self._app(scope, receive, send)
        finally:
            current_caller.reset(token)


def traces_url(endpoint: str) -> str:
    """The collector's URL; one without a path, such as ``http://collector:4318``, gets OTLP's own."""
    parts = urlsplit(endpoint)
    return urlunsplit(parts._replace(path=DEFAULT_PATH)) if parts.path in ("", "/") else endpoint


def _phases(stats: RequestStats) -> list[tuple[str, float, float]]:
    """Names, beginnings and ends of what a request went through, as far as it came."""
    phases = []
    if stats.scheduled_time is not None:
        phases.append(("queue", stats.arrival_time, stats.scheduled_time))
        if stats.first_token_time is not None:
            phases.append(("prefill", stats.scheduled_time, stats.first_token_time))
    if stats.first_token_time is not None and stats.last_token_time is not None:
        phases.append(("decode", stats.first_token_time, stats.last_token_time))
    return phases


def _attributes(request: Request, operation: str, model: str, recorder: RequestRecorder, ended: float) -> dict[str, Any]:
    params, stats, prompt_tokens = request.params, recorder.stats, len(request.prompt_token_ids)
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "moaserve",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": request.request_id,
        "gen_ai.response.finish_reasons": (recorder.finish_reason,),
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": stats.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": stats.cached_tokens,
        # vLLM's
        "gen_ai.request.id": current_request_id.get(),
        "gen_ai.usage.prompt_tokens": prompt_tokens,
        "gen_ai.usage.completion_tokens": stats.completion_tokens,
        "gen_ai.latency.e2e": ended - recorder.began,
        "gen_ai.latency.time_in_queue": _between(stats.arrival_time, stats.scheduled_time),
        "gen_ai.latency.time_to_first_token": _between(stats.arrival_time, stats.first_token_time),
        "gen_ai.latency.time_in_model_prefill": _between(stats.scheduled_time, stats.first_token_time),
        "gen_ai.latency.time_in_model_decode": _between(stats.first_token_time, stats.last_token_time),
        "gen_ai.latency.time_in_model_inference": _between(stats.scheduled_time, stats.last_token_time),
        # ours
        "moaserve.speculative_decoding.mean_acceptance_length": stats.mean_acceptance_length,
        "moaserve.speculative_decoding.draft_acceptance_rate": stats.draft_acceptance_rate,
        "moaserve.speculative_decoding.acceptance_histogram": stats.acceptance_histogram,
        "moaserve.speculative_decoding.num_drafts": stats.num_drafts,
        "moaserve.speculative_decoding.num_draft_tokens": stats.num_draft_tokens,
        "moaserve.speculative_decoding.num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
        "moaserve.num_target_calls": stats.num_target_calls,
        "moaserve.tokens_per_second": stats.tokens_per_second,
    }
    return {name: value for name, value in attributes.items() if value is not None}


def _between(since: float | None, until: float | None) -> float | None:
    return None if since is None or until is None else until - since
