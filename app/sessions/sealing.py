"""Sealed values: bytes that show whether they are ours, whole, and kept under their own key."""

from __future__ import annotations

from typing import Final

import xxhash

FORMAT: Final = 1
"""The version of what is stored. It stands in keys too: servers of different versions do not see each other's values."""
HEAD: Final = b"MoAS" + bytes([FORMAT])
_DIGEST_BYTES: Final = 16
OVERHEAD: Final = len(HEAD) + _DIGEST_BYTES


def seal(key: bytes, payload: bytes) -> bytes:
    """``payload`` behind a header: magic, format, and XXH3-128 of key and payload."""
    return b"".join((HEAD, _digest(key, payload), payload))


def unseal(key: bytes, value: bytes) -> bytes | None:
    """The payload; None if the value is anything but what was sealed under this key."""
    if not value.startswith(HEAD) or len(value) < OVERHEAD:
        return None
    payload = value[OVERHEAD:]
    return payload if value[len(HEAD) : OVERHEAD] == _digest(key, payload) else None


def _digest(key: bytes, payload: bytes) -> bytes:
    digest = xxhash.xxh3_128(len(key).to_bytes(8, "little"))
    digest.update(key)
    digest.update(payload)
    return digest.digest()
