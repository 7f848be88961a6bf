"""The wire of client-server mode: frames to bytes and back, and nothing a peer sends is believed. docs/protocol.md is its manual.

A frame is the length of its msgpack message (four bytes, little-endian), the message, and zeros that hide that length.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_args

import msgspec

from speculative.config import MEMORY_FORMATS, MemoryFormat
from speculative.errors import ProtocolError
from speculative.remote import checks, frames
from speculative.remote.frames import ClientFrame, Hello, ServerFrame
from speculative.remote.limits import Limits

VERSION = 1
"""The only version that this speaks."""

HEADER = 4
"""Bytes before a frame's message."""


@dataclass(frozen=True, slots=True)
class _Side:
    """What one side may say."""

    decoder: msgspec.msgpack.Decoder[Any]
    by_tag: Mapping[int, type[msgspec.Struct]]

    @classmethod
    def of(cls, union: Any) -> _Side:
        kinds = {kind.__struct_config__.tag: kind for kind in get_args(union)}
        return cls(msgspec.msgpack.Decoder(union), MappingProxyType(kinds))


_CLIENT, _SERVER = _Side.of(ClientFrame), _Side.of(ServerFrame)
_encoder = msgspec.msgpack.Encoder()


def frame_name(kind: type[msgspec.Struct]) -> str:
    """What documentation and messages call a frame: "verify" for Verify."""
    return kind.__name__.lower()


def encode(frame: ClientFrame | ServerFrame, padding: int = 0) -> bytes:
    """A frame as bytes, a multiple of ``padding`` of them (0 or 1: as many as there are).

    Raises ProtocolError for what msgpack cannot write: text with half a surrogate pair, whole numbers of more than 64 bits.
    """
    try:
        message = _encoder.encode(frame)
    except (UnicodeEncodeError, OverflowError) as error:
        raise ProtocolError("malformed_frame", f"{frame_name(type(frame))}: cannot be written: {error}") from None
    size = HEADER + len(message)
    return b"".join((len(message).to_bytes(HEADER, "little"), message, bytes(-size % padding if padding > 1 else 0)))


def decode_client(data: bytes, limits: Limits) -> ClientFrame:
    """What an edge has sent. Raises ProtocolError, and nothing else, for whatever is not a frame within ``limits``."""
    frame: ClientFrame = _decode(_CLIENT, data, limits)
    checks.check_client(frame, limits)
    return frame


def decode_server(data: bytes, limits: Limits) -> ServerFrame:
    """What a server has sent. Raises ProtocolError, and nothing else, for whatever is not a frame within ``limits``."""
    frame: ServerFrame = _decode(_SERVER, data, limits)
    checks.check_server(frame, limits)
    return frame


def agree(hello: Hello, fingerprint: str) -> tuple[int, MemoryFormat]:
    """Version and format of memory for an edge; ``fingerprint`` is the server's ModelInfo.pair. Raises ProtocolError for none."""
    if VERSION not in hello.versions:
        theirs = ", ".join(map(str, hello.versions))
        raise ProtocolError(
            "unsupported_version", f"this server speaks version {VERSION}, the edge {theirs}: update the older of the two"
        )
    if not fingerprint or hello.fingerprint != fingerprint:
        raise ProtocolError(
            "wrong_model",
            f"the edge's bundle is of {hello.fingerprint!r}, this server runs {fingerprint!r}: export the bundle anew",
        )
    for wanted in hello.formats:
        for known in MEMORY_FORMATS:
            if wanted == known:
                return VERSION, known
    raise ProtocolError("unsupported_format", f"this server sends memory as {', '.join(MEMORY_FORMATS)}: ask for one of these")


def _decode(side: _Side, data: bytes, limits: Limits) -> Any:
    message = _message(data, limits)
    try:
        return side.decoder.decode(message)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, MemoryError) as error:
        raise _explained(side, message, error) from None


def _message(data: bytes, limits: Limits) -> memoryview:
    """What stands between length and padding."""
    if len(data) > limits.frame_bytes:
        raise ProtocolError(
            "frame_too_large", f"a frame has {len(data)} bytes and at most {limits.frame_bytes} are taken: send less at a time"
        )
    end = HEADER + int.from_bytes(data[:HEADER], "little")
    if len(data) < HEADER or end > len(data):
        raise ProtocolError("malformed_frame", f"a frame of {len(data)} bytes is shorter than it says: send it whole")
    if data.count(0, end) != len(data) - end:
        raise ProtocolError("malformed_frame", "what stands behind a frame's message is not padding: pad with zeros")
    return memoryview(data)[HEADER:end]


_PATH = re.compile(r"\$\[(\d+)\](?:\[(\d+)\])?")


def _explained(side: _Side, message: memoryview, error: Exception) -> ProtocolError:
    """What is wrong in our words: msgspec counts fields, people name them."""
    tag = _tag(message)
    kind = None if tag is None else side.by_tag.get(tag)
    invalid = isinstance(error, msgspec.ValidationError)
    if kind is None:
        if invalid and tag is not None:
            known = ", ".join(f"{number} ({frame_name(each)})" for number, each in sorted(side.by_tag.items()))
            return ProtocolError("unknown_frame", f"no frame has the number {tag}; this side sends {known}")
        return ProtocolError("malformed_frame", f"a frame is no msgpack array that begins with its number: {_reason(error)}")
    what, _, path = str(error).partition(" - at ")
    where = ".".join((frame_name(kind), *_fields(kind, path)))
    if invalid:
        return ProtocolError("invalid_field", f"{where}: {what[:1].lower() + what[1:]}")
    return ProtocolError("malformed_frame", f"{where}: {_reason(error)}")


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]


def _tag(message: memoryview) -> int | None:
    """The number that a message begins with, if it is an array and that a small number."""
    head = bytes(message[:6])
    if not head:
        return None
    at = 1 if 0x90 <= head[0] <= 0x9F else {0xDC: 3, 0xDD: 5}.get(head[0], len(head))
    return head[at] if at < len(head) and head[at] < 0x80 else None


def _fields(kind: type[msgspec.Struct], path: str) -> list[str]:
    """The names on a path such as $[3][1], as far as they are fields'."""
    found = _PATH.search(path)
    if found is None or not 1 <= int(found[1]) <= len(kind.__struct_fields__):
        return []
    name = kind.__struct_fields__[int(found[1]) - 1]
    part = frames.PARTS.get((kind, name))
    if part is None or found[2] is None or int(found[2]) >= len(part.__struct_fields__):
        return [name]
    return [name, part.__struct_fields__[int(found[2])]]
