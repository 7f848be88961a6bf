"""What commands that serve HTTP share: a socket, logs, a server that stops in order, and what they say when they are ready."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

import typer

if TYPE_CHECKING:
    from app.deps import Serving, ServingEngine
    from app.settings import HttpSettings

    class CommandEngine(ServingEngine, Protocol):
        """An engine that is loaded, and stops when it is told to."""

        async def wait_ready(self) -> None:
            """Return once it is loaded; raises EngineError where it cannot be."""

        async def wait_lost(self) -> NoReturn:
            """Raise EngineLostError should nothing be computable any more; wait for that for ever."""

        async def drain(self, timeout: float) -> bool:
            """Take no new requests and wait up to ``timeout`` seconds for the running ones, which may be aborted then."""


logger = logging.getLogger("moaserve.app")

BACKLOG: Final = 2048
"""Connections that wait to be accepted, as many as uvicorn has."""

ABORTING_S: Final = 5
"""Seconds that clients get to be told that their texts were aborted, when the server stops before these have ended."""


def serve(settings: HttpSettings, make_engine: Callable[[], CommandEngine], what: str) -> int:
    """Load ``what`` and serve it until told to stop; the exit code."""
    _fill_standard_files()
    # Importing PyTorch takes seconds, in which a container's first process would not notice a signal that nobody handles.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _configure_logging(settings)
    listener = _bind(settings)
    return _run(settings, listener, make_engine, what)


def _fill_standard_files() -> None:
    """Where standard input, output or error were closed, sockets would take their numbers, and what libraries print to them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def _bind(settings: HttpSettings) -> socket.socket:
    """The listening socket, taken before the model is loaded: a port in use shows at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)  # until then others may bind the same address
        except OSError:
            listener.close()
            raise
    except OSError as error:
        _fail(settings, f"cannot listen on {settings.host} port {settings.port}: {error.strerror}; try another --port or --host")
    return listener


def _configure_logging(settings: HttpSettings) -> None:
    from app.logs import configure

    configure(settings.log_level, settings.log_format)
    logging.captureWarnings(settings.log_format == "json")  # or they are printed as they are
    for chatty in ("uvicorn.error", "httpx", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def _run(settings: HttpSettings, listener: socket.socket, make_engine: Callable[[], CommandEngine], what: str) -> int:
    """Serve until told to stop; the exit code."""
    import asyncio

    import uvicorn

    from app.main import create_app
    from app.settings import SettingsError
    from speculative.errors import EngineError, ServerUnreachableError

    engine = make_engine()
    try:
        app = create_app(settings, engine)
    except SettingsError as error:
        _fail(settings, str(error), code=2)
    failure: str | None = None
    edges: dict[str, Any] = {}
    if app.state.serving.remote is not None:
        edges = {
            "ws_max_size": 2 * app.state.serving.remote.host.limits.frame_bytes,  # a little too much is told so by a frame
            "ws_per_message_deflate": False,  # memory does not compress
        }

    class Server(uvicorn.Server):
        """Announces the loaded model, stops when that fails or is lost, and admits nothing more once it is told to stop.

        Told a second time, it ends at once.
        """

        told = False

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            draining = asyncio.create_task(engine.drain(settings.shutdown_timeout))
            if (remote := app.state.serving.remote) is not None:
                for listening in self.servers:
                    listening.close()
                # uvicorn hangs up on WebSockets at once; their texts have as long as streams do.
                began = time.monotonic()
                await remote.drain(settings.shutdown_timeout)
                left = settings.shutdown_timeout - (time.monotonic() - began)
                self.config.timeout_graceful_shutdown = max(0, math.ceil(left)) + ABORTING_S
            # What is left then uvicorn cancels, with a traceback in the log for each.
            assert self.config.timeout_graceful_shutdown is not None
            asyncio.get_running_loop().call_later(self.config.timeout_graceful_shutdown - 1, self.hang_up)
            await super().shutdown(sockets)
            await draining

        def hang_up(self) -> None:
            """End the requests of clients that do not read what they were told, as those of clients that leave."""
            for connection in list(self.server_state.connections):
                if connection.transport is not None:
                    connection.transport.abort()

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.told:
                os._exit(0)  # uvicorn's own second Ctrl-C still waits for the engine
            self.told = True
            super().handle_exit(sig, frame)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            self.announcement = asyncio.create_task(self._announce())

        async def _announce(self) -> None:
            nonlocal failure
            saying = f"cannot load {what}: "
            try:
                await engine.wait_ready()
                _print_welcome(settings, listener, app.state.serving)
                saying = ""
                await engine.wait_lost()
            except ServerUnreachableError as error:  # what was loaded is not at fault
                failure = str(error)
            except EngineError as error:
                failure = f"{saying}{error}"
            except Exception as error:
                logger.exception("unexpected error")
                failure = f"{saying}{error!r}"
            self.should_exit = True

    server = Server(uvicorn.Config(app, **uvicorn_options(settings), **edges))
    # uvicorn takes the signals over a little later, and afterwards raises the one that stopped it once more, for whoever started
    # it; here both are an orderly end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    _say(settings, f"Loading {what} ...", err=True)
    server.run(sockets=[listener])
    if failure is not None:
        _say_error(settings, failure)
        return 1
    if engine.alive:
        # It is still loading, somewhere in PyTorch, and an interpreter that ends around such a thread aborts.
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError):  # closed from the start, or not to be written to
                stream.flush()
        os._exit(0)
    return 0


def _say(settings: HttpSettings, text: str, err: bool = False) -> None:
    """Print, or log each line where logs are for machines; what cannot be written, on a disk that is full, stops no server."""
    if settings.log_format == "json":
        for line in text.splitlines():
            logger.info("%s", line)
        return
    with suppress(OSError):
        typer.echo(text, err=err)


def _say_error(settings: HttpSettings, message: str) -> None:
    """The same of why there is no server."""
    if settings.log_format == "json":
        logger.error("%s", message)
    else:
        _say(settings, f"moaserve: error: {message}", err=True)


def _fail(settings: HttpSettings, message: str, *, code: int = 1) -> NoReturn:
    """Say why there is no server, and end the program."""
    _say_error(settings, message)
    raise typer.Exit(code)


def uvicorn_options(settings: HttpSettings) -> dict[str, Any]:
    """How uvicorn serves, whatever the engine."""
    from app.connections import HttpProtocol, WebSocketProtocol

    return {
        "http": HttpProtocol,
        "ws": WebSocketProtocol,
        "log_config": None,
        "access_log": False,
        "timeout_graceful_shutdown": settings.shutdown_timeout + ABORTING_S,
        "lifespan": "on",
        "forwarded_allow_ips": settings.forwarded_allow_ips,
        "ssl_certfile": settings.ssl_certfile,
        "ssl_keyfile": settings.ssl_keyfile,
    }


def _print_welcome(settings: HttpSettings, listener: socket.socket, serving: Serving) -> None:
    info = serving.engine.info
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    scheme = "https" if settings.ssl_certfile else "http"
    name, url = serving.model_name(), f"{scheme}://{host}:{port}/v1"
    path, prompt = example(serving)
    playground = f"Playground: {url.removesuffix('v1')}\n" if settings.playground else ""
    _say(
        settings,
        f"MoA Serve is ready at {url}: {name}, {info.dtype} on {info.device}, drafter {info.drafter}, "
        f"{info.max_model_len} tokens of context\n{playground}"
        f'Try: curl -N {url}/{path} -H \'Content-Type: application/json\' -d \'{{"model": "{name}", "stream": true, {prompt}}}\'',
    )


def example(serving: Serving) -> tuple[str, str]:
    """A path that answers, and a prompt for it; warns where the model can be asked no chats."""
    from app.chat import fault
    from speculative.errors import InvalidRequestError

    try:
        why = fault(serving.tokenizer, serving.template_variables)
    except InvalidRequestError as error:
        logger.warning("only prompts of token ids will be answered: %s", error)
        return "completions", '"prompt": [1, 2, 3]'
    if why is None:
        return "chat/completions", '"messages": [{"role": "user", "content": "Hello!"}]'
    logger.warning("chats will be refused (--chat-template may name a file with another template): %s", why)
    return "completions", '"prompt": "Once upon a time"'
