"""Who may ask, how often and how much: what is refused before a request is read."""

from __future__ import annotations

import math
import time
from fnmatch import fnmatchcase
from functools import partial

from limits import RateLimitItem, parse_many
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import (
    ApiError,
    AuthenticationError,
    PermissionDeniedError,
    RequestTooLargeError,
    TooManyRequestsError,
    UnsupportedEncodingError,
)
from app.keys import ApiKeys
from app.paths import routed_path
from app.settings import HttpSettings

GUARDED = ("/v1/", "/tokenize", "/tokenizer_info", "/detokenize")
"""What costs work or tells of the model; probes, metrics and the API's description are for everyone who can reach the server."""


class Guard:
    """ASGI middleware: host, key, rate, size and encoding of a request, in this order."""

    def __init__(self, app: ASGIApp, settings: HttpSettings, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys
        self._rates = Rates(settings.rate_limit)
        self._hosts = [_host_pattern(host) for host in settings.allowed_hosts.split(",")] if settings.allowed_hosts else []
        self._origins = [origin.strip() for origin in (settings.cors_origins or "").split(",")]
        self._most = settings.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check(scope, headers)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, self._limited(receive) if scope["type"] == "http" else receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        host = _without_port(headers.get("host", "")).lower()
        if self._hosts and not any(fnmatchcase(host, allowed) for allowed in self._hosts):
            raise PermissionDeniedError(f"This server does not answer for the host '{host}'.", code="host_not_allowed")
        # A browser asks without a key whether it may ask with one.
        if scope.get("method") != "OPTIONS" and routed_path(scope).startswith(GUARDED):
            caller = scope["client"][0] if scope.get("client") else "unknown"
            if self._keys.required:
                owner = self._keys.owner(headers.get("authorization"))
                if owner is None:
                    raise AuthenticationError("authorization" in headers)
                caller = owner
                scope.setdefault("state", {})["owner"] = owner
            self._rates.take(caller)
            scope.setdefault("state", {})["take_rate"] = partial(self._rates.take, caller)
        if scope["type"] == "websocket" or (scope["method"] == "POST" and "content-type" not in headers):
            self._check_origin(headers)
        if (length := headers.get("content-length", "")).isdecimal() and int(length) > self._most:
            raise RequestTooLargeError(self._most)
        if (encoding := headers.get("content-encoding", "identity")).lower() != "identity":
            raise UnsupportedEncodingError(encoding)

    def _check_origin(self, headers: Headers) -> None:
        """Browsers let any page open a WebSocket, or send a body without a type, and say where the page is from.

        Nothing else protects a server without keys.
        """
        origin = headers.get("origin")
        if origin is None or "*" in self._origins or origin in self._origins:
            return
        if origin.partition("://")[2] != headers.get("host"):
            message = f"Pages of '{origin}' may not connect: start the server with --cors-origins {origin}."
            raise PermissionDeniedError(message, code="origin_not_allowed")

    def _limited(self, receive: Receive) -> Receive:
        """Bodies may come without a length, or with a false one."""
        taken = 0

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._most:
                error = RequestTooLargeError(self._most)
                raise HTTPException(error.status, error.message)
            return message

        return limited


def _host_pattern(allowed: str) -> str:
    """What `fnmatchcase` is to find hosts by; its sets of characters are none here, as brackets are those of an IPv6 address."""
    host = allowed.strip().lower()
    if host.count(":") > 1 and not host.startswith("["):
        host = f"[{host}]"
    return host.replace("[", "[[]")


def _without_port(host: str) -> str:
    """A Host header's host; of an IPv6 address, which has colons of its own, with its brackets."""
    name, _, port = host.rpartition(":")
    return name if name and "]" not in port else host


class Rates:
    """How often each caller may ask: rates in the words of `limits`, such as "60/minute;1000/day"."""

    def __init__(self, rates: str | None) -> None:
        self._rates: list[RateLimitItem] = parse_many(rates) if rates else []
        self._limiter = MovingWindowRateLimiter(MemoryStorage())

    def take(self, caller: str) -> None:
        """Count one request; raises TooManyRequestsError, and then counts none."""
        for rate in self._rates:
            if not self._limiter.test(rate, caller):
                wait = self._limiter.get_window_stats(rate, caller).reset_time - time.time()
                raise TooManyRequestsError(
                    f"You may send {rate} and have.", code="rate_limit_exceeded", retry_after=max(1, math.ceil(wait))
                )
        for rate in self._rates:
            self._limiter.hit(rate, caller)
