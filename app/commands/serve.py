"""`moaserve serve`."""

from __future__ import annotations

import logging
import signal
import socket
from typing import TYPE_CHECKING, Annotated

import typer

from app.commands import options

if TYPE_CHECKING:
    from app.settings import Settings
    from speculative.async_engine import AsyncEngine

GRACE_S = 10  # for requests that still run when the server is told to stop


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; 0.0.0.0 for all. (default: 127.0.0.1)")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 for any free one. (default: 8000)")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name that clients use for the model. (default: the model's own)")
    ] = None,
    config: options.Config = None,
    log_level: options.LogLevel = None,
    model: options.Model = None,
    dtype: options.DType = None,
    device: options.Device = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    prefill_chunk: options.PrefillChunk = None,
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
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    for chatty in ("uvicorn.error", "httpx", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger("sse_starlette").setLevel(logging.WARNING)  # at debug level it logs what is streamed


def _run(settings: Settings, listener: socket.socket) -> int:
    """Serve until told to stop; the exit code."""
    import asyncio

    import uvicorn

    from app.main import create_app
    from speculative.async_engine import AsyncEngine
    from speculative.errors import EngineError

    engine = AsyncEngine.from_config(settings.engine_config())
    failure: EngineError | None = None

    class Server(uvicorn.Server):
        """Announces the loaded model, and stops when it cannot be loaded."""

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
            create_app(settings, engine), log_config=None, access_log=False, timeout_graceful_shutdown=GRACE_S, lifespan="on"
        )
    )
    # uvicorn raises the signal that stopped it once more, for whoever started it; here that is an orderly end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    typer.echo(f"Loading {settings.model} ...", err=True)
    server.run(sockets=[listener])
    if failure is not None:
        typer.echo(f"moaserve: error: cannot load {settings.model}: {failure}", err=True)
        return 1
    return 0


def _print_welcome(settings: Settings, listener: socket.socket, engine: AsyncEngine) -> None:
    info = engine.info
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    name, url = settings.served_model_name or info.name, f"http://{host}:{port}/v1"
    typer.echo(
        f"MoA Serve is ready at {url}: {name}, {info.dtype} on {info.device}, drafter {info.drafter}, "
        f"{info.max_model_len} tokens of context\n"
        f"Try: curl -N {url}/chat/completions -H 'Content-Type: application/json' "
        f'-d \'{{"model": "{name}", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}\''
    )
