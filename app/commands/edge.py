"""`moaserve edge`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.commands import http_options, options, serving

if TYPE_CHECKING:
    from speculative.edge.engine import EdgeEngine

LINK = "The server that verifies"
DRAFTING = "Drafting"


def edge(
    server: Annotated[
        str | None,
        typer.Option(
            help="Address of the MoA Serve server that verifies: wss://example.org, or ws:// where nobody can listen in.",
            rich_help_panel=LINK,
        ),
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(help="Folder that moaserve export-edge wrote of that server's model and drafter.", rich_help_panel=LINK),
    ] = None,
    server_api_key: Annotated[
        str | None,
        typer.Option(
            help="Key for the server; better in the environment (MOASERVE_SERVER_API_KEY) or in a file, as all users of a machine "
            "see its command lines. (default: none)",
            rich_help_panel=LINK,
        ),
    ] = None,
    server_api_key_file: Annotated[
        Path | None, typer.Option(help="File that holds this key and nothing else.", rich_help_panel=LINK)
    ] = None,
    server_ca_file: Annotated[
        Path | None,
        typer.Option(help="Certificates (PEM) to trust instead of the system's, for a server with its own.", rich_help_panel=LINK),
    ] = None,
    memory_format: Annotated[
        str | None,
        typer.Option(
            help="How the drafter's memory is sent: int8, int4 (half the bytes) or bfloat16. (default: int8)",
            rich_help_panel=LINK,
        ),
    ] = None,
    offline: Annotated[
        str | None,
        typer.Option(
            help="What becomes of answers while the server is out of reach: correct (the drafter writes on alone, and the server "
            "puts right what it wrote when it is back), keep (it writes on, and that stays) or stop (they end with an error). "
            "(default: correct)",
            rich_help_panel=LINK,
        ),
    ] = None,
    reconnect_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds that an answer waits for a lost connection before that. (default: 1)", rich_help_panel=LINK),
    ] = None,
    host: http_options.Host = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 for any free one. (default: 8001)")] = None,
    served_model_name: http_options.ServedModelName = None,
    chat_template: http_options.ChatTemplate = None,
    chat_template_kwargs: http_options.ChatTemplateKwargs = None,
    tool_call_format: http_options.ToolCallFormat = None,
    reasoning_format: http_options.ReasoningFormat = None,
    config: options.Config = None,
    log_level: options.LogLevel = None,
    log_format: http_options.LogFormat = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Type that is computed in: auto, float32 or bfloat16. (default: auto: what is fast here)",
            rich_help_panel=DRAFTING,
        ),
    ] = None,
    compile: Annotated[
        str | None,
        typer.Option(
            help="Compile the drafter for this CPU: auto, on or off. Takes two minutes or more, once; it drafts some four times as "
            "fast then. (default: auto: where there is a C++ compiler, or operators for it were compiled beforehand, the drafter "
            "is small and its weights are not int8)",
            rich_help_panel=DRAFTING,
        ),
    ] = None,
    num_threads: Annotated[
        int | None, typer.Option(help="CPU threads. (default: PyTorch's choice)", rich_help_panel=DRAFTING)
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Texts written at a time; others wait. (default: 4)", rich_help_panel=DRAFTING)
    ] = None,
    draft_depth: Annotated[
        int | None,
        typer.Option(
            help="Most tokens drafted ahead; how many follows from network and drafter. (default: 8)", rich_help_panel=DRAFTING
        ),
    ] = None,
    draft_breadth: Annotated[
        int | None, typer.Option(help="Candidates kept at each depth. (default: 8)", rich_help_panel=DRAFTING)
    ] = None,
    draft_nodes: Annotated[
        int | None,
        typer.Option(
            help="Most candidates sent at once, if the server takes as many; how many follows likewise. (default: 64)",
            rich_help_panel=DRAFTING,
        ),
    ] = None,
    draft_temperature: options.DraftTemperature = None,
    draft_lookup: options.DraftLookup = None,
    api_key: http_options.ApiKey = None,
    api_key_file: http_options.ApiKeyFile = None,
    rate_limit: http_options.RateLimit = None,
    max_queue_requests: http_options.MaxQueueRequests = None,
    max_queue_tokens: http_options.MaxQueueTokens = None,
    max_body_bytes: http_options.MaxBodyBytes = None,
    request_timeout: http_options.RequestTimeout = None,
    shutdown_timeout: http_options.ShutdownTimeout = None,
    watchdog_timeout: http_options.WatchdogTimeout = None,
    store_max_responses: http_options.StoreMaxResponses = None,
    store_max_bytes: http_options.StoreMaxBytes = None,
    store_ttl: http_options.StoreTtl = None,
    redis_url: http_options.RedisUrl = None,
    redis_timeout: http_options.RedisTimeout = None,
    redis_prefix: http_options.RedisPrefix = None,
    vllm_metric_names: http_options.VllmMetricNames = None,
    otlp_traces_endpoint: http_options.OtlpTracesEndpoint = None,
    cors_origins: http_options.CorsOrigins = None,
    allowed_hosts: http_options.AllowedHosts = None,
    forwarded_allow_ips: http_options.ForwardedAllowIps = None,
    root_path: http_options.RootPath = None,
    playground: http_options.Playground = None,
    ssl_certfile: http_options.SslCertfile = None,
    ssl_keyfile: http_options.SslKeyfile = None,
) -> None:
    """Serve OpenAI's HTTP API on this machine, drafting here and having a server verify: same answers, few round trips.

    The server runs `moaserve serve` with the model; this machine needs no more of it than a bundle, some hundredths of its size.

    Every option can also be set as an environment variable (--server: MOASERVE_SERVER) or in a TOML file given by --config
    (server = "wss://example.org"). An option beats the environment, and the environment the file.

    For example:

      moaserve export-edge --out bundle                       where the model is

      moaserve serve                                          there too

      moaserve edge --server ws://127.0.0.1:8000 --bundle bundle

      MOASERVE_SERVER_API_KEY=... moaserve edge --server wss://example.org --bundle bundle --offline stop
    """
    from app.edge_settings import EdgeSettings

    given = {name: value for name, value in locals().items() if name != "EdgeSettings"}
    settings = options.settings_of(EdgeSettings, given)

    def engine() -> EdgeEngine:
        from speculative.edge.engine import EdgeEngine

        return EdgeEngine(settings.edge_config())

    raise typer.Exit(serving.serve(settings, engine, f"the bundle {settings.bundle} for {settings.edge_config().server}"))
