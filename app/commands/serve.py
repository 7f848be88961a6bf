"""`moaserve serve`."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.commands import options

if TYPE_CHECKING:
    from app.settings import Settings
    from speculative.async_engine import AsyncEngine

GUARD = "Who may ask, how often and how much"
STORE = "Stored responses"
SESSIONS = "Sessions"
WATCHING = "Metrics and traces"
REMOTE = "Edges"


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; 0.0.0.0 for all. (default: 127.0.0.1)")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 for any free one. (default: 8000)")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name that clients use for the model. (default: the model's own)")
    ] = None,
    tool_call_format: Annotated[
        str | None, typer.Option(help="How the model calls tools: auto, hermes, llama3_json or none. (default: auto)")
    ] = None,
    config: options.Config = None,
    log_level: options.LogLevel = None,
    log_format: Annotated[str | None, typer.Option(help="text, or json: one object a line. (default: text)")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Key that callers must send, or several, with commas; better in the environment (MOASERVE_API_KEY) or in a file, "
            "as all users of a machine see its command lines. (default: none is needed)",
            rich_help_panel=GUARD,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File with a key a line, or its digest: sha256:…, in hex.", rich_help_panel=GUARD),
    ] = None,
    rate_limit: Annotated[
        str | None,
        typer.Option(help="How often a key, or an address, may ask: 60/minute, 5/second;1000/day.", rich_help_panel=GUARD),
    ] = None,
    max_queue_requests: Annotated[
        int | None, typer.Option(help="Requests that may wait for a slot; others get a 429. (default: 1024)", rich_help_panel=GUARD)
    ] = None,
    max_queue_tokens: Annotated[
        int | None, typer.Option(help="Prompt tokens that may wait likewise. (default: no limit)", rich_help_panel=GUARD)
    ] = None,
    max_body_bytes: Annotated[
        int | None, typer.Option(help="Larger requests get a 413. (default: 16 MiB)", rich_help_panel=GUARD)
    ] = None,
    request_timeout: Annotated[
        float | None, typer.Option(help="Seconds after which a request ends with a 408. (default: never)", rich_help_panel=GUARD)
    ] = None,
    shutdown_timeout: Annotated[
        int | None,
        typer.Option(help="Seconds that running requests get after SIGTERM. (default: 30)", rich_help_panel=GUARD),
    ] = None,
    watchdog_timeout: Annotated[
        float | None,
        typer.Option(help="Seconds at one step after which /health says 503; 0: never. (default: 120)", rich_help_panel=GUARD),
    ] = None,
    store_max_responses: Annotated[
        int | None,
        typer.Option(help="Responses kept for callers who go on with them; 0: none. (default: 10000)", rich_help_panel=STORE),
    ] = None,
    store_max_bytes: Annotated[int | None, typer.Option(help="Bytes of them. (default: 256 MiB)", rich_help_panel=STORE)] = None,
    store_ttl: Annotated[
        float | None, typer.Option(help="Seconds that each is kept. (default: 86400, a day)", rich_help_panel=STORE)
    ] = None,
    session_max_bytes: Annotated[
        int | None,
        typer.Option(
            help="Bytes of KV cache kept for later turns beside the engine's own prefix cache, by all servers on a Redis together; "
            "0: none. (default: 1 GiB in Redis, none without)",
            rich_help_panel=SESSIONS,
        ),
    ] = None,
    session_ttl: Annotated[
        float | None,
        typer.Option(help="Seconds that they are kept after their last use. (default: 86400, a day)", rich_help_panel=SESSIONS),
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(
            help="Redis that keeps KV cache and responses over restarts and for several servers: redis://, rediss:// (TLS) or "
            "unix://; one with a password better in the environment (MOASERVE_REDIS_URL), as all users of a machine see its "
            "command lines. (default: this server's memory)",
            rich_help_panel=SESSIONS,
        ),
    ] = None,
    redis_timeout: Annotated[
        float | None, typer.Option(help="Seconds that a request waits for Redis at most. (default: 0.25)", rich_help_panel=SESSIONS)
    ] = None,
    redis_prefix: Annotated[
        str | None,
        typer.Option(
            help="What the keys in Redis begin with; servers with the same share. (default: moaserve)", rich_help_panel=SESSIONS
        ),
    ] = None,
    vllm_metric_names: Annotated[
        bool | None,
        typer.Option(
            "--vllm-metric-names/--no-vllm-metric-names",
            help="Tell metrics that vLLM has under its names too, for its dashboards. (default: false)",
            rich_help_panel=WATCHING,
            show_default=False,
        ),
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            help="OTLP/HTTP collector that OpenTelemetry traces are sent to, such as http://localhost:4318; needs moaserve[otel].",
            rich_help_panel=WATCHING,
        ),
    ] = None,
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
    cors_origins: Annotated[
        str | None,
        typer.Option(
            help="Web pages that may ask from a browser: https://a.org,https://b.org, or *. (default: none)", rich_help_panel=GUARD
        ),
    ] = None,
    allowed_hosts: Annotated[
        str | None, typer.Option(help="Host headers that are answered: a.org,*.b.org. (default: all)", rich_help_panel=GUARD)
    ] = None,
    forwarded_allow_ips: Annotated[
        str | None,
        typer.Option(help="Proxies whose X-Forwarded-* headers are believed. (default: 127.0.0.1)", rich_help_panel=GUARD),
    ] = None,
    root_path: Annotated[str | None, typer.Option(help="Path that a proxy strips.", rich_help_panel=GUARD)] = None,
    playground: Annotated[
        bool | None,
        typer.Option(
            "--playground/--no-playground", help="Serve a page to try the model on, at /. (default: true)", show_default=False
        ),
    ] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(help="TLS certificate (PEM).", rich_help_panel=GUARD)] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="Its private key (PEM).", rich_help_panel=GUARD)] = None,
    model: options.Model = None,
    dtype: options.DType = None,
    device: options.Device = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    prefill_chunk: options.PrefillChunk = None,
    prefix_cache_tokens: options.PrefixCacheTokens = None,
    num_threads: options.NumThreads = None,
    compile: options.Compile = None,
    drafter: options.Drafter = None,
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
    # Importing PyTorch takes seconds, in which a container's first process would not notice a signal that nobody handles.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    listener = _bind(settings)
    _configure_logging(settings)
    raise typer.Exit(_run(settings, listener))


def _bind(settings: Settings) -> socket.socket:
    """The listening socket, taken before the model is loaded: a port in use shows at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        options.fail(f"cannot listen on {settings.host} port {settings.port}: {error.strerror}; try another --port or --host")
    return listener


def _configure_logging(settings: Settings) -> None:
    from app.logs import configure

    configure(settings.log_level, settings.log_format)
    for chatty in ("uvicorn.error", "httpx", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger("sse_starlette").setLevel(logging.WARNING)  # at debug level it logs what is streamed


def _run(settings: Settings, listener: socket.socket) -> int:
    """Serve until told to stop; the exit code."""
    import asyncio

    import uvicorn

    from app.main import create_app
    from app.settings import SettingsError
    from speculative.async_engine import AsyncEngine
    from speculative.errors import EngineError

    engine = AsyncEngine.from_config(settings.engine_config())
    try:
        app = create_app(settings, engine)
    except SettingsError as error:
        options.fail(str(error), code=2)
    failure: EngineError | None = None

    class Server(uvicorn.Server):
        """Announces the loaded model, stops when it cannot be loaded, and admits nothing more once it is told to stop."""

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            draining = asyncio.create_task(engine.drain(settings.shutdown_timeout))
            for listening in self.servers:
                listening.close()
            # uvicorn hangs up on WebSockets at once; their texts have as long as streams do.
            began = time.monotonic()
            await app.state.serving.remote.drain(settings.shutdown_timeout)
            self.config.timeout_graceful_shutdown = max(0, math.ceil(settings.shutdown_timeout - (time.monotonic() - began)))
            await super().shutdown(sockets)
            await draining

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            self.announcement = asyncio.create_task(self._announce())

        async def _announce(self) -> None:
            nonlocal failure
            try:
                await engine.wait_ready()
            except EngineError as error:
                failure = error
                self.should_exit = True
            else:
                _print_welcome(settings, listener, engine)

    server = Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=settings.shutdown_timeout,
            ws="websockets-sansio",
            ws_max_size=2 * app.state.serving.remote.host.limits.frame_bytes,  # a little too much is told so by a frame
            ws_per_message_deflate=False,  # memory does not compress
            lifespan="on",
            forwarded_allow_ips=settings.forwarded_allow_ips,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
        )
    )
    # uvicorn takes the signals over a little later, and afterwards raises the one that stopped it once more, for whoever started
    # it; here both are an orderly end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)
    typer.echo(f"Loading {settings.model} ...", err=True)
    server.run(sockets=[listener])
    if failure is not None:
        typer.echo(f"moaserve: error: cannot load {settings.model}: {failure}", err=True)
        return 1
    if engine.alive:
        # It is still loading, somewhere in PyTorch, and an interpreter that ends around such a thread aborts.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


def _print_welcome(settings: Settings, listener: socket.socket, engine: AsyncEngine) -> None:
    info = engine.info
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    scheme = "https" if settings.ssl_certfile else "http"
    name, url = settings.served_model_name or info.name, f"{scheme}://{host}:{port}/v1"
    playground = f"Playground: {url.removesuffix('v1')}\n" if settings.playground else ""
    typer.echo(
        f"MoA Serve is ready at {url}: {name}, {info.dtype} on {info.device}, drafter {info.drafter}, "
        f"{info.max_model_len} tokens of context\n{playground}"
        f"Try: curl -N {url}/chat/completions -H 'Content-Type: application/json' "
        f'-d \'{{"model": "{name}", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}\''
    )
