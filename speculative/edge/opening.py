"""How an edge comes to a connection with its server, or to know what is wrong."""

from __future__ import annotations

import asyncio
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus, InvalidURI, WebSocketException

from speculative.edge.connection import Connection, Socket
from speculative.errors import ProtocolError, ServerUnreachableError
from speculative.remote.frames import Error, Hello, Welcome
from speculative.remote.limits import Limits
from speculative.remote.protocol import VERSION, decode_server, encode

PATH = "/v1/speculative/sessions"

OPENING_S = 5.0
"""Seconds in which a connection is made and greeted, or given up."""

PERMANENT = frozenset({"unsupported_version", "unsupported_format", "wrong_model"})
"""Refusals that stay the same however often one asks."""

UNKNOWN_AUTHORITY = frozenset({18, 19, 20, 21})
OTHER_HOST = frozenset({62, 64})
"""OpenSSL's X509_V_ERR codes of chains that end in nobody who is trusted, and of names or addresses that do not match."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server is (ws:// or wss://, host and port, perhaps a path that a proxy strips) and how one is let in.

    ``ca_file`` (PEM) names the authorities that are trusted instead of the system's. Messages have its address as ``str`` gives
    it: without a password for a proxy on the way, as callers are told them too.
    """

    url: str
    api_key: str | None = None
    ca_file: Path | None = None

    def __str__(self) -> str:
        return re.sub("//[^/]*@", "//", self.url, count=1)

    @property
    def sessions_url(self) -> str:
        """Where the WebSocket is."""
        return self.url.rstrip("/").removesuffix("/v1") + PATH

    def options(self) -> dict[str, Any]:
        """What the WebSocket library is told of it; raises ServerUnreachableError for a file that holds no certificates."""
        options: dict[str, Any] = {}
        if self.api_key is not None:
            options["additional_headers"] = {"Authorization": f"Bearer {self.api_key}"}
        if self.ca_file is not None:
            try:
                options["ssl"] = ssl.create_default_context(cafile=str(self.ca_file))
            except (OSError, ssl.SSLError) as error:
                message = f"{self.ca_file} holds no certificates that can be read: {error}"
                raise ServerUnreachableError(message, permanent=True) from error
        return options


async def open_connection(server: Server, hello: Hello, *, known: bool = False) -> Connection:
    """Connect and greet; raises ServerUnreachableError with what is wrong and what to do.

    Where a server is ``known`` to have been there, what stands in its place says nothing for good: it is the page to log in to of
    another network, say, or a proxy whose server starts anew.
    """
    try:
        return await asyncio.wait_for(_open(server, hello, known), OPENING_S)
    except asyncio.TimeoutError:
        raise ServerUnreachableError(f"{server} does not answer: is this the right host and port, and does it run?") from None


async def _open(server: Server, hello: Hello, known: bool) -> Connection:
    try:
        socket = await connect(
            server.sessions_url,
            compression=None,  # what takes room is random to it
            max_size=hello.frame_bytes,
            ping_interval=None,
            open_timeout=None,
            create_connection=Socket,
            **server.options(),
        )
    except InvalidStatus as error:
        raise _refused(server, error.response.status_code, known) from error
    except InvalidURI as error:
        if error.uri != server.sessions_url:
            message = f"{server} sends on to {error.uri}, where no WebSocket is: is there a page to log in to?"
            raise ServerUnreachableError(message, permanent=not known) from error
        raise ServerUnreachableError(f"{server} is no address of a server: {error.msg}", permanent=True) from error
    except ssl.SSLCertVerificationError as error:
        raise _distrusted(server, error, known) from error
    except (OSError, EOFError, WebSocketException) as error:
        said = _said(error)
        if isinstance(error, ssl.SSLError) and error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            said = "it does not speak TLS; if it is to be asked without, its address begins with ws://"
        elif isinstance(error, InvalidMessage) and server.url.startswith("ws://"):
            said += "; if it speaks TLS, its address begins with wss://"
        raise ServerUnreachableError(f"{server} cannot be reached: {said}") from error
    except ImportError as error:
        raise ServerUnreachableError(f"{server} cannot be reached through this proxy: {error}", permanent=True) from error
    except ValueError as error:  # a port that is no number, a name that no host can have, a key that no header can hold
        message = f"{server} cannot be asked: {error}; is its address right, and its proxy's, and the key?"
        raise ServerUnreachableError(message, permanent=True) from error
    assert isinstance(socket, Socket)
    try:
        await socket.send(socket.count(encode(hello)))
        limits = Limits(frame_bytes=hello.frame_bytes)
        frame = decode_server(_binary(await socket.recv()), limits)
        if isinstance(frame, Error):
            message, permanent = f"{server}: {frame.message}", frame.code in PERMANENT
            raise ServerUnreachableError(message, permanent=permanent, starting=frame.code == "not_ready")
        if not isinstance(frame, Welcome) or frame.version != VERSION or frame.format not in hello.formats:
            raise ServerUnreachableError(f"{server} does not greet as MoA Serve does: is it another kind of server?")
    except (ConnectionClosed, ProtocolError) as error:
        socket.transport.abort()
        raise ServerUnreachableError(f"{server} did not answer the greeting: {_said(error)}") from error
    except BaseException:
        socket.transport.abort()
        raise
    return Connection(socket, frame, Limits.of(frame, hello.frame_bytes))


def _binary(data: str | bytes) -> bytes:
    if isinstance(data, str):
        raise ProtocolError("malformed_frame", "frames are binary, and this was text")
    return data


def _said(error: Exception) -> str:
    if isinstance(error, ConnectionClosed) and error.rcvd is None:
        return "the connection broke off"  # the library speaks of close frames
    return str(error) or type(error).__name__


def _distrusted(server: Server, error: ssl.SSLCertVerificationError, known: bool) -> ServerUnreachableError:
    """What to do depends on what is wrong with a certificate: another authority helps only where its own is unknown."""
    if error.verify_code in UNKNOWN_AUTHORITY:
        trusted = "the system's" if server.ca_file is None else f"those in {server.ca_file}"
        problem = f"it is of none of {trusted}: name its authority's certificate with --server-ca-file"
    elif error.verify_code in OTHER_HOST:
        problem = "it is another host's: use a name of the server that stands in it"
    else:
        problem = "the server needs another one"
    message = f"{server}: its certificate is not trusted ({error.verify_message}); {problem}"
    return ServerUnreachableError(message, permanent=not known)


def _refused(server: Server, status: int, known: bool) -> ServerUnreachableError:
    if status in (401, 403):
        message = f"{server} does not let this edge in ({status}): set MOASERVE_SERVER_API_KEY to a key of that server"
        return ServerUnreachableError(message, permanent=True)
    if status == 404:
        message = (
            f"{server} has no {PATH}: is it a MoA Serve server that takes edges, and does a proxy in between pass on `Upgrade` "
            "(docs/self-hosting.md)?"
        )
        return ServerUnreachableError(message, permanent=not known)
    # 502 to 504 are a proxy's, whose server starts.
    return ServerUnreachableError(f"{server} does not take connections now (HTTP {status})", starting=status in (502, 503, 504))
