"""One request as it is measured: sent when it is due, over a connection of its own, as from users who know nothing of each other.

HTTP is read where bytes arrive, by the parser that uvicorn serves with: a client with more to do would take the server's time, and
stamp what comes later than it came.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import httptools

from benchmarks.serving.events import EventReader

Clock = Callable[[], float]
_LONGEST_PROBLEM = 300


class AddressError(Exception):
    """A base URL cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server answers, and what certificates call it; ``path`` ends in ``/v1``, or whatever its routes stand under."""

    host: str
    name: str
    port: int
    path: str
    tls: ssl.SSLContext | None = field(repr=False)
    headers: str = field(repr=False)

    @classmethod
    def of(cls, base_url: str, api_key: str | None = None) -> Address:
        """Of a URL such as http://127.0.0.1:8000/v1; raises AddressError."""
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError as error:
            raise AddressError(str(error)) from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise AddressError("it must be http://HOST:PORT/v1 or https://…")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        return cls(
            parts.hostname,
            parts.hostname,
            port or (443 if tls else 80),
            parts.path.rstrip("/"),
            tls,
            f"Host: {parts.netloc}\r\n{key}",
        )

    async def located(self) -> Address:
        """The same by number, so that no request waits for a name: where something listens now. Raises OSError."""
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, self.host, self.port)
        host = transport.get_extra_info("peername")[0]
        transport.abort()
        return replace(self, host=host)

    def request(self, route: str, body: dict[str, Any]) -> bytes:
        """All that is sent to ask ``body`` of a route such as /completions."""
        content = json.dumps(body).encode()
        head = f"POST {self.path}{route} HTTP/1.1\r\n{self.headers}Content-Type: application/json\r\n"
        return f"{head}Accept: text/event-stream\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request. All times are seconds since it was due, whenever it was sent: ``late`` says how much later.

    ``first`` is its first text's, ``end`` its last token's, ``gaps`` the seconds between one piece of text and the next, ``text``
    a hash of it. ``drafts``, ``accepted`` and ``passes`` (verifications that carried a draft, draft tokens that they accepted, and
    all passes of the target) are None where the server does not tell. Of one that failed ``error`` says why, ``end`` when.
    """

    late: float
    first: float = 0.0
    end: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    gaps: tuple[float, ...] = ()
    drafts: int | None = None
    accepted: int | None = None
    passes: int | None = None
    text: str = ""
    error: str | None = None

    @property
    def per_token(self) -> float | None:
        """Seconds for each token after the first, however many came at a time.

        None of a single token, and where only the end was seen, as of an answer without text.
        """
        seen = bool(self.gaps) or self.end > self.first
        return (self.end - self.first) / (self.tokens - 1) if self.tokens > 1 and seen else None


class _Exchange(asyncio.Protocol):
    """Sends one request and reads one response."""

    def __init__(self, request: bytes, done: asyncio.Future[None], clock: Clock) -> None:
        self.reader = EventReader()
        self.status = 0
        self.problem = b""
        self._request, self._done, self._clock, self._now = request, done, clock, 0.0
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"this is not HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        if error is None and self.status == 200:  # a body of unknown length ends so
            self._end(self.reader.end())
        else:
            self._end(f"the connection was lost{f': {error}' if error else ''}")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.status == 200:
            self.reader.feed(self._now, body)
        elif len(self.problem) < _LONGEST_PROBLEM:
            self.problem += body

    def on_message_complete(self) -> None:
        if self.status == 200:
            self._end(self.reader.end())
        elif self.status > 200:  # 100: the real one follows
            self._end(f"{self.status}: {self.problem[:_LONGEST_PROBLEM].decode(errors='replace')}")

    def _end(self, error: str | None) -> None:
        if not self._done.done():
            self.reader.error = error
            self._done.set_result(None)


async def ask(address: Address, request: bytes, due: float, timeout: float, clock: Clock = time.perf_counter) -> Outcome:
    """Send ``request``, which was due at ``due`` by ``clock``, and wait until it is answered or ``timeout`` seconds after that.

    Raises nothing: what fails is told by the outcome.
    """
    loop = asyncio.get_running_loop()
    late = clock() - due
    done: asyncio.Future[None] = loop.create_future()
    transport: asyncio.Transport | None = None

    async def exchange() -> _Exchange:
        nonlocal transport
        transport, protocol = await loop.create_connection(
            lambda: _Exchange(request, done, clock),
            address.host,
            address.port,
            ssl=address.tls,
            server_hostname=address.name if address.tls else None,
        )
        await done
        return protocol

    try:
        protocol = await asyncio.wait_for(exchange(), timeout - late)
    except asyncio.TimeoutError:
        return Outcome(late, end=clock() - due, error=f"no answer within {timeout:g} s")
    except OSError as error:  # ssl's and the resolver's errors are such too
        return Outcome(late, end=clock() - due, error=f"no connection: {error}")
    finally:
        if transport is not None:
            transport.abort()
    reader = protocol.reader
    if reader.error is not None or reader.usage is None or reader.last is None:
        return Outcome(late, end=clock() - due, error=reader.error or "the answer is no stream of events")
    speculation = reader.speculation
    return Outcome(
        late=late,
        first=(reader.last if reader.first is None else reader.first) - due,
        end=reader.last - due,
        tokens=reader.usage.completion_tokens,
        prompt_tokens=reader.usage.prompt_tokens,
        cached_tokens=reader.usage.cached_tokens,
        gaps=tuple(reader.gaps),
        drafts=speculation.num_spec_steps if speculation else None,
        accepted=speculation.num_accepted_draft_tokens if speculation else None,
        passes=speculation.num_target_calls if speculation else None,
        text=reader.text,
    )
