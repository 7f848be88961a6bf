"""uvicorn's protocols as this server speaks them: requests arrive in time, or are told why not, and bad handshakes end."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from http import HTTPStatus
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import ProtocolError
from websockets.frames import CloseCode, Frame, Opcode
from websockets.server import ServerProtocol
from websockets.streams import StreamReader

from app.errors import ApiError, InvalidParameterError, RequestTimeoutError, UnavailableError
from speculative.errors import SHUTTING_DOWN

HEAD_BYTES: Final = 64 * 1024
"""What a request's line and headers may have."""

ARRIVAL_S: Final[dict[Any, float]] = {h11.IDLE: 60.0, h11.SEND_BODY: 300.0}
"""Seconds that a client has to send a request's head, and then its body."""

PIECE: Final = 16 * 1024
"""Bytes that are taken in one turn of the event loop: in chunks of one byte these are 2,700, each of which takes h11 some 30 µs."""

FRAMES: Final = 64
"""Frames of a WebSocket that are taken in one turn, of any size: each costs some 20 µs, and its bytes next to nothing."""

FRAGMENTS: Final = 1024
FRAGMENT_BYTES: Final = 1024
"""A message has at most FRAGMENTS fragments, unless they have FRAGMENT_BYTES each on average beyond that."""


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
        self._refuse(RequestTimeoutError.of_arrival(seconds))

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


class _Reader(StreamReader):
    """What has come over a WebSocket; its parser is stopped before a frame that is one too many for a turn of the event loop."""

    frames = FRAMES

    def at_eof(self) -> Generator[None, None, bool]:
        """Wait for a frame, as the parser does before each, and for a turn that has room for it."""
        while not self.frames:
            yield
        self.frames -= 1
        return (yield from super().at_eof())


class _WebSocket(ServerProtocol):
    """websockets', without messages in crumbs; who does not read is owed a pong for the last ping alone (RFC 6455, 5.5.3)."""

    reader: _Reader
    unread = False
    """Whether the peer reads less than it is sent."""
    pong: Frame | None = None
    """What it is owed then."""

    _fragments = 0

    def parse(self) -> Generator[None]:
        """Begin with a reader that keeps count."""
        self.reader = _Reader()
        yield from super().parse()

    def recv_frame(self, frame: Frame) -> None:
        """Take a frame, or end the connection."""
        super().recv_frame(frame)
        if frame.opcode not in (Opcode.CONT, Opcode.TEXT, Opcode.BINARY):
            return
        self._fragments = 0 if frame.fin else self._fragments + 1
        if self._fragments > FRAGMENTS + (self.current_size or 0) // FRAGMENT_BYTES:
            reason = f"a message of more than {FRAGMENTS} fragments needs larger ones"
            self.fail(CloseCode.POLICY_VIOLATION, reason)
            self.parser_exc = ProtocolError(reason)

    def send_frame(self, frame: Frame) -> None:
        """Keep a pong back where it would wait behind others."""
        if self.unread and frame.opcode is Opcode.PONG:
            self.pong = frame
        else:
            super().send_frame(frame)


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """WebSockets, some frames at a time; handshakes that the library refuses by itself end there, and not when the server does."""

    conn: _WebSocket

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        extensions = self.conn.available_extensions
        self.conn = _WebSocket(extensions=extensions, max_size=self.config.ws_max_size, logger=self.conn.logger)
        self._takes_later = False

    def data_received(self, data: bytes) -> None:
        """Take what has come; a peer has nothing to say before its handshake is answered."""
        if self.handshake_initiated and not self.handshake_complete:
            self._takes_later = True
            self.transport.pause_reading()
        if self._takes_later:
            self.conn.reader.feed_data(data)
        else:
            self._take(data)

    def _take(self, data: bytes = b"") -> None:
        paused, self._takes_later = self._takes_later, False
        reader = self.conn.reader
        if self.transport.is_closing():
            reader.discard()
            return
        reader.frames = FRAMES
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:  # uvicorn looks for a request alone
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()
        elif reader.buffer and not reader.frames:
            self.transport.pause_reading()
            self.read_paused = False  # else uvicorn goes on reading once the application has its message
            self._takes_later = True
            self.loop.call_soon(self._take)
        elif paused:
            self.read_paused = not self.queue.empty() and not self.close_sent
            if not self.read_paused:
                self.transport.resume_reading()

    def pause_writing(self) -> None:
        """Wait for a peer that does not read."""
        super().pause_writing()
        self.conn.unread = True

    def resume_writing(self) -> None:
        """Go on, with the pong that the peer is owed."""
        super().resume_writing()
        self.conn.unread = False
        if self.conn.pong is not None and not self.transport.is_closing():
            self.conn.send_frame(self.conn.pong)
            self.transport.write(b"".join(self.conn.data_to_send()))
        self.conn.pong = None

    async def send(self, message: Any) -> None:
        """Tell the peer, and uvicorn that a handshake which was answered in HTTP has been dealt with: else it logs an error."""
        unanswered = not self.handshake_complete
        await super().send(message)
        if self.close_sent:
            self.handshake_complete = True
        if unanswered and self.handshake_complete and self._takes_later:
            self._take()

    def send_500_response(self) -> None:
        """Say that no handshake will come, unless that has been said: a second time is an error, which would end a shutdown."""
        if not self.conn.eof_sent:
            super().send_500_response()
