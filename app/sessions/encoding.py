"""Stored responses as JSON, and back; large ones off the event loop.

They are written and read item by item: within one call to the C code of `json` no other thread runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from json.decoder import JSONArray  # type: ignore[attr-defined]  # typeshed leaves it out
from typing import Any

from app.sessions.off_loop import IN_LOOP_BYTES, off_loop
from app.sessions.shape import is_stored_response
from app.sessions.store import StoredResponse

VALUE_BYTES = 16
"""About what a value takes besides its text."""

ESCAPED = 12
"""Bytes that no character's JSON exceeds."""

_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]  # and this


async def encode(stored: StoredResponse) -> bytes:
    """A response as a JSON list: document, items, and whether it continues the last of them."""
    return await off_loop(_at_least([stored.document, stored.items]), lambda: _written(stored))


async def decode(data: bytes) -> StoredResponse:
    """What `encode` has made bytes of."""
    return StoredResponse(*await off_loop(len(data), lambda: _read(data)))


async def decode_foreign(data: bytes) -> StoredResponse | None:
    """The response in bytes that anyone may have written; None where it is none."""
    found = await off_loop(len(data), lambda: _read_if_ours(data))
    return StoredResponse(*found) if found is not None else None


async def is_larger(items: Sequence[dict[str, Any]], most: int) -> bool:
    """Whether items take more than ``most`` bytes; no more of them are written than it takes to know, and usually none."""
    size = _at_least(items)
    if size <= IN_LOOP_BYTES and ESCAPED * size <= most:
        return False
    return await off_loop(size, lambda: _exceeds(items, most))


def _written(stored: StoredResponse) -> bytes:
    items = ", ".join([json.dumps(item) for item in stored.items])
    return f"[{json.dumps(stored.document)}, [{items}], {json.dumps(stored.continues)}]".encode()


def _read(data: bytes) -> list[Any]:
    """Raises ValueError and RecursionError for what is no JSON list."""
    text = data.decode()
    if not text.startswith("["):
        raise ValueError("it is no list")
    values, end = JSONArray((text, 1), _scan_member)
    if end != len(text):
        raise ValueError("something follows")
    read: list[Any] = values
    return read


def _scan_member(text: str, place: int) -> Any:
    return JSONArray((text, place + 1), _scan) if text[place : place + 1] == "[" else _scan(text, place)


def _read_if_ours(data: bytes) -> list[Any] | None:
    try:
        read = _read(data)
    except (ValueError, RecursionError):
        return None
    return read if is_stored_response(read) else None


def _exceeds(items: Sequence[dict[str, Any]], most: int) -> bool:
    size = 0
    for item in items:
        size += len(json.dumps(item))
        if size > most:
            return True
    return False


def _at_least(value: Any) -> int:
    """About how many bytes a value takes; it is not counted any further than what a thread is worth."""
    size, waiting = 0, [value]
    while waiting and size <= IN_LOOP_BYTES:
        match waiting.pop():
            case str() as text:
                size += len(text)
            case int() as number:
                size += number.bit_length() // 4  # it has more digits than that
            case list() as values:
                size += VALUE_BYTES * len(values)
                waiting += values
            case dict() as members:
                size += VALUE_BYTES * len(members)
                waiting += [*members, *members.values()]
    return size
