"""Every metric's name, meaning and unit. All start with ``moaserve_`` and carry ``model_name``; most end as vLLM's do.

Beside them stand prometheus_client's own of the process and of Python, whose names have no prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from app.recording import POSITIONS
from speculative.config import EdgeStatus, EngineStatus, ModelInfo

PREFIX: Final = "moaserve_"
LABEL: Final = "model_name"
OTHER: Final = "other"
"""The label of an error whose code is none of `ERROR_CODES`: what a client can choose must not become a label."""

ERROR_CODES: Final[dict[str, int]] = {
    "client_closed_request": 499,
    "context_length_exceeded": 400,
    "conversation_too_large": 400,
    "host_not_allowed": 403,
    "internal_error": 500,
    "invalid_api_key": 401,
    "invalid_json": 400,
    "invalid_type": 400,
    "invalid_value": 400,
    "item_not_found": 404,
    "method_not_allowed": 405,
    "missing_required_parameter": 400,
    "model_not_found": 404,
    "not_found": 404,
    "origin_not_allowed": 403,
    "previous_response_not_found": 400,
    "queue_full": 429,
    "rate_limit_exceeded": 429,
    "request_timeout": 408,
    "request_too_large": 413,
    "response_not_found": 404,
    "service_unavailable": 503,
    "unknown_parameter": 400,
    "unsupported_encoding": 415,
    "unsupported_parameter": 400,
}
"""The codes of errors, each with the status that it comes with; both are labels."""


class Watched(Protocol):
    """What the gauges are read from: the engine."""

    @property
    def ready(self) -> bool:
        """True once the model is loaded, until the engine drains or stops."""

    @property
    def alive(self) -> bool:
        """True while the engine's thread runs."""

    @property
    def busy_seconds(self) -> float:
        """How long that thread has been at its present step; 0 while it loads, or has nothing to do."""

    @property
    def info(self) -> ModelInfo:
        """The loaded model; raises EngineNotReadyError before."""

    def status(self) -> EngineStatus:
        """How busy it is."""


GAUGES: Final[dict[str, tuple[str, Callable[[EngineStatus, Watched], float]]]] = {
    "num_requests_running": ("Requests being decoded now.", lambda status, _: status.num_running),
    "num_requests_waiting": ("Requests waiting for a slot.", lambda status, _: status.num_waiting),
    "kv_cache_usage_perc": ("Share of the KV cache in use, 0 to 1.", lambda status, _: status.kv_cache_usage),
    "engine_up": ("1 while the engine's thread runs, 0 once it has ended or loading has failed.", lambda _, engine: engine.alive),
    "engine_ready": ("1 while requests are taken, 0 while the server shuts down.", lambda _, engine: engine.ready),
    "engine_busy_seconds": (
        "Seconds that the engine has been at its present step; 0 while it has nothing to do.",
        lambda _, engine: engine.busy_seconds,
    ),
    "spec_decode_max_depth": (
        "Most levels of a draft tree in the latest step; 0 where nothing was to be drafted.",
        lambda status, _: status.draft_depth,
    ),
    "spec_decode_max_nodes": (
        "Most nodes of a draft tree in the latest step; 0 where nothing was to be drafted.",
        lambda status, _: status.draft_nodes,
    ),
}
EDGE_GAUGES: Final[dict[str, tuple[str, Callable[[EdgeStatus], float | None]]]] = {
    "edge_server_up": ("1 while this edge is connected to its server, else 0; only edges tell it.", lambda edge: edge.server_up),
    "edge_round_trip_seconds": (
        "Seconds from a ping of this edge's to its server's answer, smoothed; none while cut off.",
        lambda edge: edge.round_trip,
    ),
}
EDGE_COUNTERS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "edge_reconnects": ("Connections that this edge has made in the place of lost ones.", ()),
    "edge_bytes": ("Bytes that this edge has sent to its server and received from it.", ("direction",)),
    "edge_offline_tokens": ("Tokens that this edge's drafter has written alone, cut off from its server.", ()),
    "edge_corrected_tokens": ("Such tokens in whose place the server has put others when it was back.", ()),
}
REPLICA_LABEL: Final = "replica"
"""On what an engine says of itself, where several serve together (`moaserve ray`)."""
REPLICA_GAUGE: Final = (
    "replicas",
    "Engines that take requests, where several serve together (moaserve ray); elsewhere there is none.",
)
REPLICA_COUNTERS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "replica_failovers": ("Texts that went on at another replica, as theirs was lost.", ()),
    "replica_placements": (
        "Texts given to a replica, by whether it was one that knows their beginning (near: true or false).",
        ("near",),
    ),
}
INFO: Final = (
    "model_info",
    "1; labels say what is served: the drafter, the data type, the device, tokens of context and the server's version.",
    ("drafter", "dtype", "device", "max_model_len", "version"),
)
MEMORY: Final = (
    "memory_planned_bytes",
    "Bytes that the engine takes when all is in use, by part: process, weights, drafter_weights, weight_copies, working, kv_cache, "
    "drafter_cache, prefix_cache.",
    ("part",),
)
ENGINE_COUNTERS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "engine_steps": ("Steps of the engine: a verification of all running requests, or prompts read.", ()),
    "engine_step_seconds": ("Seconds that the engine's steps took, by phase: prefill, draft, verify, commit.", ("phase",)),
}
COUNTERS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "prompt_tokens": ("Prompt tokens of requests that have begun.", ()),
    "generation_tokens": ("Tokens generated.", ()),
    "prefix_cache_queries": ("Prompt tokens that were looked up in the prefix cache.", ()),
    "prefix_cache_hits": ("Prompt tokens that were found in the prefix cache and not computed again.", ()),
    "request_success": ("Requests ended, by how: stop, length, abort (the client left) or error.", ("finished_reason",)),
    "spec_decode_num_drafts": ("Verifications that carried a draft.", ()),
    "spec_decode_num_draft_tokens": ("Draft tokens verified.", ()),
    "spec_decode_num_accepted_tokens": ("Draft tokens accepted.", ()),
    "spec_decode_num_accepted_tokens_per_pos": (
        f"Draft tokens accepted, by their position in the draft, 0 to {POSITIONS - 1}.",
        ("position",),
    ),
    "session_store_operations": ("Operations of the stores of responses and KV cache.", ("operation", "outcome")),
    "session_store_bytes": ("Bytes that these stores have read and written.", ("direction",)),
    "remote_resumes": ("Texts of edges that went on on another connection.", ()),
    "remote_verifications": (
        "Draft trees of edges, by outcome: verified, left (their text had gone elsewhere), repeated (answered before).",
        ("outcome",),
    ),
    "remote_bytes": ("Bytes of frames received from edges and sent to them.", ("direction",)),
    "remote_errors": ("Errors that edges were told, by code.", ("code",)),
    "request_errors": ("Requests answered with an error, in a stream too, by HTTP status and error code.", ("status", "code")),
}
_TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
HISTOGRAMS: Final[dict[str, tuple[str, tuple[float, ...]]]] = {
    "time_to_first_token_seconds": (
        "Seconds from a request's arrival in the engine to its first token.",
        (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
    ),
    "inter_token_latency_seconds": (
        "Seconds from token to token; tokens of one step share its time evenly.",
        (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5),
    ),
    "e2e_request_latency_seconds": (
        "Seconds from submitting a request to its end.",
        (0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480),
    ),
    "request_queue_time_seconds": (
        "Seconds that a request waited for a slot.",
        (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320),
    ),
    "request_prefill_time_seconds": (
        "Seconds from getting a slot to the first token.",
        (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80),
    ),
    "request_decode_time_seconds": (
        "Seconds from the first token to the last.",
        (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480),
    ),
    "request_prompt_tokens": ("Tokens of a request's prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens generated for a request.", _TOKENS),
    "request_acceptance_length": (
        "Tokens gained per verification that carried a draft, the bonus token included; a request's mean.",
        (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 10),
    ),
    "request_tokens_per_second": (
        "Tokens per second of a request after its first token.",
        (1, 2, 5, 10, 20, 50, 100, 200, 300, 400, 500, 750, 1000, 2000, 5000),
    ),
    "request_target_calls": (
        "Forward passes of the target that a request took part in.",
        (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000),
    ),
    "request_server_calls": (
        "Answers of the server that a request of this edge's took; elsewhere none is counted.",
        (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000),
    ),
    "session_store_seconds": (
        "Seconds that an operation of the stores of responses and KV cache took.",
        (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
    ),
}
HISTOGRAM_LABELS: Final[dict[str, tuple[str, ...]]] = {"session_store_seconds": ("operation",)}
"""Those of histograms beside the model's name."""

REMOTE_GAUGES: Final[dict[str, str]] = {
    "remote_sessions": "Texts of edges that are kept: being written, or ended and not forgotten yet.",
    "remote_connections": "Edges that are connected now.",
}
STORE_UP: Final = ("session_store_up", "1 while Redis can be reached, else 0; without Redis there is none.")
VLLM_NAMES: Final = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prompt_tokens",
        "generation_tokens",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "request_success",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    }
)
"""Those that vLLM has too, with ``vllm:`` before them."""
