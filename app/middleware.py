"""One access line per request, with its id; never what was asked or answered."""

from __future__ import annotations

import logging
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("moaserve.access")

CLIENT_GONE = 499
PROBES = frozenset({"/health", "/ready", "/metrics"})


class AccessLog:
    """ASGI middleware: gives each request an ``X-Request-ID`` and logs how it ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, watching both directions."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        began = time.perf_counter()
        status, complete, gone = 500, False, False

        async def watched_receive() -> Message:
            nonlocal gone
            message = await receive()
            gone = gone or (message["type"] == "http.disconnect" and not complete)
            return message

        async def watched_send(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = request_id
            await send(message)
            complete = complete or (message["type"] == "http.response.body" and not message.get("more_body", False))

        try:
            await self._app(scope, watched_receive, watched_send)
        finally:
            logger.log(
                logging.DEBUG if scope["path"] in PROBES else logging.INFO,
                "%s %r %d %.1f ms id=%s",
                scope["method"],
                scope["path"],  # quoted: a path may hold line breaks
                CLIENT_GONE if gone else status,
                (time.perf_counter() - began) * 1000,
                request_id,
            )
