"""What all routes share: HEAD, errors that nobody foresaw, and an access line per request; never what was asked or answered."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import NotFoundError, to_api_error
from app.logs import current_request_id
from app.paths import routed_path

logger = logging.getLogger("moaserve.access")

CLIENT_GONE = 499
SWITCHING_PROTOCOLS = 101
_PRINTABLE = re.compile(r"[!-~]{1,128}")
PROBES = frozenset({"/health", "/ready", "/metrics"})


class Head:
    """ASGI middleware: HEAD is GET without a body, wherever there is GET; routes need not say so."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, without_body)


class NoSocket:
    """ASGI middleware: a WebSocket that no route takes gets the 404 of any other request; Starlette's refusal is a bare 403."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            if message["type"] == "websocket.close" and not begun:
                error = NotFoundError(f"There is no such route: WebSocket {scope['path']}.", code="not_found")
                await error.response()(scope, receive, send)
                return
            begun = True
            await send(message)

        await self._app(scope, receive, watched)


class Unexpected:
    """ASGI middleware: what nobody foresaw is logged, and answered if that is still possible.

    Starlette's own handler of such errors is outside all middleware: its answers would lack the request's id and CORS headers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # libraries in Rust panic with what is no Exception
            if scope["type"] != "http" or begun:
                raise
            await to_api_error(error).response()(scope, receive, send)


class ErrorCount:
    """ASGI middleware: tells ``count`` the status and the code of each error that is answered; probes do not count."""

    def __init__(self, app: ASGIApp, count: Callable[[int, str], None]) -> None:
        self._app, self._count = app, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] not in ("http", "websocket") or routed_path(scope) in PROBES:
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        try:
            await self._app(scope, receive, send)
        finally:
            if (error := state.get("error")) is not None:
                self._count(error.status, error.code)


class AccessLog:
    """ASGI middleware: gives each request an ``X-Request-ID``, the caller's own where it sent one, and logs how it ended.

    A WebSocket is logged when it ends, with 101 if it was one at all.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, watching both directions."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _PRINTABLE.fullmatch(given) else uuid.uuid4().hex
        token = current_request_id.set(request_id)
        began = time.perf_counter()
        status, complete, gone = 500, False, False
        method = scope.get("method", "GET")  # a WebSocket begins as one
        probe = routed_path(scope) in PROBES

        async def watched_receive() -> Message:
            nonlocal gone
            message = await receive()
            gone = gone or (message["type"] == "http.disconnect" and not complete)  # sockets are hung up on, which is no fault
            return message

        async def watched_send(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "websocket.accept":
                status = SWITCHING_PROTOCOLS
                MutableHeaders(scope=message)["X-Request-ID"] = request_id
            elif message["type"] in ("http.response.start", "websocket.http.response.start"):
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = request_id
            await send(message)
            complete = complete or (message["type"] == "http.response.body" and not message.get("more_body", False))

        try:
            await self._app(scope, watched_receive, watched_send)
        finally:
            logger.log(
                logging.DEBUG if probe else logging.INFO,
                "%s %r %d %.1f ms",
                method,
                scope["path"],  # quoted: a path may hold line breaks
                CLIENT_GONE if gone else status,
                (time.perf_counter() - began) * 1000,
                extra={"method": method, "path": scope["path"], "status": CLIENT_GONE if gone else status},
            )
            current_request_id.reset(token)
