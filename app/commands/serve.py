"""`moaserve serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from app.commands import http_options, options, serving

if TYPE_CHECKING:
    from speculative.async_engine import AsyncEngine

REMOTE = "Edges"


def serve(
    host: http_options.Host = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 for any free one. (default: 8000)")] = None,
    served_model_name: http_options.ServedModelName = None,
    chat_template: http_options.ChatTemplate = None,
    chat_template_kwargs: http_options.ChatTemplateKwargs = None,
    tool_call_format: http_options.ToolCallFormat = None,
    reasoning_format: http_options.ReasoningFormat = None,
    config: options.Config = None,
    log_level: options.LogLevel = None,
    log_format: http_options.LogFormat = None,
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
    session_max_bytes: Annotated[
        int | None,
        typer.Option(
            help="Bytes of KV cache kept for later turns beside the engine's own prefix cache, by all servers on a Redis together; "
            "0: none. (default: 1 GiB in Redis, none without)",
            rich_help_panel=http_options.SESSIONS,
        ),
    ] = None,
    session_ttl: Annotated[
        float | None,
        typer.Option(
            help="Seconds that they are kept after their last use. (default: 86400, a day)", rich_help_panel=http_options.SESSIONS
        ),
    ] = None,
    redis_url: http_options.RedisUrl = None,
    redis_timeout: http_options.RedisTimeout = None,
    redis_prefix: http_options.RedisPrefix = None,
    vllm_metric_names: http_options.VllmMetricNames = None,
    otlp_traces_endpoint: http_options.OtlpTracesEndpoint = None,
    remote_sessions: Annotated[
        int | None, typer.Option(help="Texts at a time on one connection of an edge. (default: 64)", rich_help_panel=REMOTE)
    ] = None,
    remote_in_flight: Annotated[
        int | None,
        typer.Option(help="Draft trees of a text that may be on their way at once. (default: 4)", rich_help_panel=REMOTE),
    ] = None,
    remote_tree_nodes: Annotated[
        int | None,
        typer.Option(
            help="Nodes of a draft tree that an edge may send, what it hopes for of trees in flight included. (default: 32)",
            rich_help_panel=REMOTE,
        ),
    ] = None,
    remote_idle_seconds: Annotated[
        float | None,
        typer.Option(
            help="Seconds after which a text is forgotten whose edge is away or silent. (default: 60)",
            rich_help_panel=REMOTE,
        ),
    ] = None,
    cors_origins: http_options.CorsOrigins = None,
    allowed_hosts: http_options.AllowedHosts = None,
    forwarded_allow_ips: http_options.ForwardedAllowIps = None,
    root_path: http_options.RootPath = None,
    playground: http_options.Playground = None,
    ssl_certfile: http_options.SslCertfile = None,
    ssl_keyfile: http_options.SslKeyfile = None,
    model: options.Model = None,
    dtype: options.DType = None,
    device: options.Device = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    prefill_chunk: options.PrefillChunk = None,
    prefix_cache_tokens: options.PrefixCacheTokens = None,
    num_threads: options.NumThreads = None,
    memory_limit: options.MemoryLimit = None,
    compile: options.Compile = None,
    tensor_parallel_size: options.TensorParallelSize = None,
    drafter: options.Drafter = None,
    draft_policy: options.DraftPolicy = None,
    draft_depth: options.DraftDepth = None,
    draft_breadth: options.DraftBreadth = None,
    draft_nodes: options.DraftNodes = None,
    draft_min_reach: options.DraftMinReach = None,
    draft_temperature: options.DraftTemperature = None,
    draft_lookup: options.DraftLookup = None,
    draft_window: options.DraftWindow = None,
) -> None:
    """Serve a model over OpenAI's HTTP API.

    Without options: the bundled model with its drafter, on http://127.0.0.1:8000/v1.

    Every option can also be set as an environment variable (--max-num-seqs: MOASERVE_MAX_NUM_SEQS) or in a TOML file given by
    --config (max_num_seqs = 8). An option beats the environment, and the environment the file.

    For example:

      moaserve serve --port 8123 --dtype float32

      moaserve serve --model Qwen/Qwen2.5-0.5B-Instruct --drafter ngram

      MOASERVE_HOST=0.0.0.0 moaserve serve --max-num-seqs 64
    """
    settings = options.load_settings(**locals())  # the parameters, which are named as the settings are

    def engine() -> AsyncEngine:
        from speculative.async_engine import AsyncEngine

        return AsyncEngine.from_config(settings.engine_config())

    raise typer.Exit(serving.serve(settings, engine, settings.model))
