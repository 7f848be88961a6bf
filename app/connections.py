"""uvicorn's protocols as this server speaks them: requests arrive in time, or are told why not, and bad handshakes end."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from app.errors import ApiError, InvalidParameterError, RequestArrivalError, UnavailableError
from speculative.errors import SHUTTING_DOWN

HEAD_BYTES: Final = 64 * 1024
"""What a request's line and headers may have."""

ARRIVAL_S: Final[dict[Any, float]] = {h11.IDLE: 60.0, h11.SEND_BODY: 300.0}
"""Seconds that a client has to send a request's head, and then its body."""

PIECE: Final = 16 * 1024
"""Bytes that are taken in one turn of the event loop: in chunks of one byte these are 2,700, each of which takes h11 some 30 µs."""


class _Connection(h11.Connection):
    """h11's, for paths alone, and with less to do for a stream's chunks: each would go through all states, and change none."""

    _chunks = False

    def next_event(self) -> Any:
        """What has come; a request's target is its path, though clients may send the whole URL (RFC 9112, 3.2.2)."""
        event = super().next_event()
        if isinstance(event, h11.Request) and event.target[:4].lower() == b"http":
            path = event.target.partition(b"://")[2].partition(b"/")[2]
            return h11.Request(method=event.method, target=b"/" + path, headers=event.headers, http_version=event.http_version)
        return event

    def send(self, event: Any) -> Any:
        """What goes over the wire for ``event``."""
        if self._chunks and isinstance(event, h11.Data):
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        sent = super().send(event)
        self._chunks = isinstance(event, h11.Response) and b"\r\nTransfer-Encoding: chunked\r\n" in (sent or b"")
        return sent


class HttpProtocol(H11Protocol):
    """HTTP/1.1; what is refused before there is a request for the application has OpenAI's shape too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Connection(h11.SERVER, HEAD_BYTES)
        self._untaken = bytearray()
        self._takes_soon = False
        self._awaited: Any = None
        self._arrival: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Wait for a first request."""
        super().connection_made(transport)
        self._await()

    def data_received(self, data: bytes) -> None:
        """Take what has come, piece by piece, and wait for what is missing."""
        self._untaken += data
        if not self._takes_soon:
            self._take()

    def _take(self) -> None:
        paused, self._takes_soon = self._takes_soon, False
        if self.transport.is_closing():
            self._untaken.clear()
        if not self._untaken:
            return
        piece = bytes(self._untaken[:PIECE])
        del self._untaken[:PIECE]
        super().data_received(piece)
        self._await()
        if self._untaken and self in self.connections:  # before a handshake is answered a WebSocket says nothing
            self.transport.pause_reading()
            self._takes_soon = True
            self.loop.call_soon(self._take)
        elif paused and not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        super().connection_lost(exc)
        self._untaken.clear()
        self._await()

    def _await(self) -> None:
        # uvicorn's time limit between requests ends with the first byte of the next one.
        awaited = self.conn.their_state if self in self.connections else None  # those that became WebSockets are not there
        if awaited is self._awaited:
            return
        self._awaited = awaited
        if self._arrival is not None:
            self._arrival.cancel()
        seconds = ARRIVAL_S.get(awaited)
        self._arrival = None if seconds is None else self.loop.call_later(seconds, self._give_up, seconds)

    def _give_up(self, seconds: float) -> None:
        self._refuse(RequestArrivalError(seconds))

    def _should_upgrade(self) -> bool:
        # Only a GET without a body can become a WebSocket. All else may wish for another protocol, and is answered in this one.
        body = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        return self._get_upgrade() == b"websocket" and self._should_upgrade_to_ws() and self.scope["method"] == "GET" and not body

    def send_400_response(self, msg: str) -> None:
        """Refuse what h11 does not take for a request."""
        message = f"This is not HTTP/1.1, or its headers have more than {HEAD_BYTES} bytes."
        self._refuse(InvalidParameterError(message))

    def shutdown(self) -> None:
        """End the connection once its answer is out; a request that has not arrived by now would be refused anyway."""
        if self.conn.their_state is h11.SEND_BODY and not self.cycle.response_started:
            self._refuse(UnavailableError(SHUTTING_DOWN))
        else:
            super().shutdown()

    def _refuse(self, error: ApiError) -> None:
        """Answer in place of the application, unless it answers already or nothing was asked, and hang up."""
        asked = self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0]
        if asked and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = error.response()
            headers = [*response.raw_headers, (b"connection", b"close")]
            reason = HTTPStatus(error.status).phrase
            for event in (
                h11.Response(status_code=error.status, headers=headers, reason=reason),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event))
        if self.cycle is not None:  # the application learns of it as of a client that has gone
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """WebSockets; handshakes that the library refuses by itself end there, and not when the server does."""

    def data_received(self, data: bytes) -> None:
        """Take what has come."""
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:  # uvicorn looks for a request alone
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    async def send(self, message: Any) -> None:
        """Tell the peer, and uvicorn that a handshake which was answered in HTTP has been dealt with: else it logs an error."""
        await super().send(message)
        if self.close_sent:
            self.handshake_complete = True

    def send_500_response(self) -> None:
        """Say that no handshake will come, unless that has been said: a second time is an error, which would end a shutdown."""
        if not self.conn.eof_sent:
            super().send_500_response()
