"""API keys: known by their digests alone."""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path

from pydantic import SecretStr

OWNER_DIGITS = 32
"""Hex digits of a key's digest that tell its owner from others: as many as it takes that nobody finds two keys that share them."""

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


class KeyFileError(ValueError):
    """A file of keys that cannot be used."""


class ApiKeys:
    """The keys that are accepted; none at all lets everyone in."""

    def __init__(self, digests: list[bytes]) -> None:
        self._digests = digests

    @classmethod
    def load(cls, given: SecretStr | None, file: Path | None) -> ApiKeys:
        """Keys given as text, separated by commas, and those of a file, one a line: itself, or ``sha256:`` and its digest in hex.

        Empty lines and those that begin with # are skipped. Raises KeyFileError.
        """
        keys = [key.strip() for key in given.get_secret_value().split(",")] if given is not None else []
        if file is not None:
            try:
                lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
            except (OSError, UnicodeDecodeError) as error:
                raise KeyFileError(f"{file} cannot be read: {error}") from error
            keys += [line for line in lines if line and not line.startswith("#")]
        digests = [bytes.fromhex(match[1]) if (match := _DIGEST.fullmatch(key)) else digest(key) for key in keys if key]
        if (given is not None or file is not None) and not digests:
            raise KeyFileError("no key was given: nobody could use this server")
        return cls(digests)

    @property
    def required(self) -> bool:
        """Whether callers need one."""
        return bool(self._digests)

    @property
    def several(self) -> bool:
        """Whether callers have different ones."""
        return len(set(self._digests)) > 1

    def owner(self, authorization: str | None) -> str | None:
        """Who has the key in an Authorization header, as limits, responses and sessions name him; None if it is none of ours."""
        scheme, _, key = (authorization or "").partition(" ")
        own = digest(key.strip())
        # All are compared, whichever is right: how long it takes tells nothing.
        matches = [hmac.compare_digest(own, known) for known in self._digests]
        return own.hex()[:OWNER_DIGITS] if scheme.lower() == "bearer" and any(matches) else None


def digest(key: str) -> bytes:
    """What is kept of a key. Keys are long and random, so that a plain hash is enough."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
