"""Options of all commands that serve HTTP: see `app.settings.HttpSettings`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

GUARD = "Who may ask, how often and how much"
STORE = "Stored responses"
SESSIONS = "Sessions"
WATCHING = "Metrics and traces"

Host = Annotated[str | None, typer.Option(help="Address to listen on; 0.0.0.0 for all. (default: 127.0.0.1)")]
ServedModelName = Annotated[
    str | None,
    typer.Option(
        help="Name that clients use for the model, or several with commas: answers and metrics have the first. "
        "(default: the model's own)"
    ),
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(help="File with a Jinja template that writes conversations for the model. (default: the model's own)"),
]
ChatTemplateKwargs = Annotated[
    str | None,
    typer.Option(
        help="Variables for the chat template where a request sets none, as a JSON object: '{\"enable_thinking\": false}' turns "
        "Qwen3's thoughts off. (default: none)"
    ),
]
ToolCallFormat = Annotated[
    str | None, typer.Option(help="How the model calls tools: auto, hermes, llama3_json or none. (default: auto)")
]
ReasoningFormat = Annotated[
    str | None,
    typer.Option(
        help="What the model thinks before it answers is told apart, as reasoning_content: think where it stands between <think> "
        "and </think>, none to leave it in the answer. (default: auto: as the chat template says)"
    ),
]
LogFormat = Annotated[str | None, typer.Option(help="text, or json: one object a line. (default: text)")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        help="Key that callers must send, or several, with commas; better in the environment (MOASERVE_API_KEY) or in a file, "
        "as all users of a machine see its command lines. (default: none is needed)",
        rich_help_panel=GUARD,
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(help="File with a key a line, or its digest: sha256:…, in hex.", rich_help_panel=GUARD),
]
RateLimit = Annotated[
    str | None,
    typer.Option(help="How often a key, or an address, may ask: 60/minute, 5/second;1000/day.", rich_help_panel=GUARD),
]
MaxQueueRequests = Annotated[
    int | None, typer.Option(help="Requests that may wait for a slot; others get a 429. (default: 1024)", rich_help_panel=GUARD)
]
MaxQueueTokens = Annotated[
    int | None, typer.Option(help="Prompt tokens that may wait likewise. (default: no limit)", rich_help_panel=GUARD)
]
MaxBodyBytes = Annotated[int | None, typer.Option(help="Larger requests get a 413. (default: 16 MiB)", rich_help_panel=GUARD)]
RequestTimeout = Annotated[
    float | None, typer.Option(help="Seconds after which a request ends with a 408. (default: never)", rich_help_panel=GUARD)
]
ShutdownTimeout = Annotated[
    int | None,
    typer.Option(help="Seconds that running requests get after SIGTERM. (default: 30)", rich_help_panel=GUARD),
]
WatchdogTimeout = Annotated[
    float | None,
    typer.Option(help="Seconds at one step after which /health says 503; 0: never. (default: 120)", rich_help_panel=GUARD),
]
StoreMaxResponses = Annotated[
    int | None,
    typer.Option(help="Responses kept for callers who go on with them; 0: none. (default: 10000)", rich_help_panel=STORE),
]
StoreMaxBytes = Annotated[int | None, typer.Option(help="Bytes of them. (default: 256 MiB)", rich_help_panel=STORE)]
StoreTtl = Annotated[float | None, typer.Option(help="Seconds that each is kept. (default: 86400, a day)", rich_help_panel=STORE)]
RedisUrl = Annotated[
    str | None,
    typer.Option(
        help="Redis that keeps KV cache and responses over restarts and for several servers: redis://, rediss:// (TLS) or "
        "unix://; one with a password better in the environment (MOASERVE_REDIS_URL), as all users of a machine see its "
        "command lines. (default: this server's memory)",
        rich_help_panel=SESSIONS,
    ),
]
RedisTimeout = Annotated[
    float | None, typer.Option(help="Seconds that a request waits for Redis at most. (default: 0.25)", rich_help_panel=SESSIONS)
]
RedisPrefix = Annotated[
    str | None,
    typer.Option(
        help="What the keys in Redis begin with; servers with the same share. (default: moaserve)", rich_help_panel=SESSIONS
    ),
]
VllmMetricNames = Annotated[
    bool | None,
    typer.Option(
        "--vllm-metric-names/--no-vllm-metric-names",
        help="Tell metrics that vLLM has under its names too, for its dashboards. (default: false)",
        rich_help_panel=WATCHING,
        show_default=False,
    ),
]
OtlpTracesEndpoint = Annotated[
    str | None,
    typer.Option(
        help="OTLP/HTTP collector that OpenTelemetry traces are sent to, such as http://localhost:4318; needs moaserve[otel].",
        rich_help_panel=WATCHING,
    ),
]
CorsOrigins = Annotated[
    str | None,
    typer.Option(
        help="Web pages that may ask from a browser: https://a.org,https://b.org, or *. (default: none)", rich_help_panel=GUARD
    ),
]
AllowedHosts = Annotated[
    str | None, typer.Option(help="Host headers that are answered: a.org,*.b.org,[::1]. (default: all)", rich_help_panel=GUARD)
]
ForwardedAllowIps = Annotated[
    str | None,
    typer.Option(help="Proxies whose X-Forwarded-* headers are believed. (default: 127.0.0.1)", rich_help_panel=GUARD),
]
RootPath = Annotated[str | None, typer.Option(help="Path that a proxy strips.", rich_help_panel=GUARD)]
Playground = Annotated[
    bool | None,
    typer.Option(
        "--playground/--no-playground", help="Serve a page to try the model on, at /. (default: true)", show_default=False
    ),
]
SslCertfile = Annotated[Path | None, typer.Option(help="TLS certificate (PEM).", rich_help_panel=GUARD)]
SslKeyfile = Annotated[Path | None, typer.Option(help="Its private key (PEM).", rich_help_panel=GUARD)]
