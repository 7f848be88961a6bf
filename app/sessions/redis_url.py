"""Redis URLs: what is accepted, and what may be shown of them."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from redis.asyncio.connection import BlockingConnectionPool, parse_url
from redis.exceptions import RedisError

_OPTIONS: Final = {"db", "username", "password", "client_name", "max_connections", "protocol", "socket_keepalive"}
_FORM: Final = (
    "it must be redis://[user:password@]host[:port][/db], rediss:// for the same with TLS, or unix:///path/to/socket[?db=n]; "
    "special characters in a password are written as %XX"
)


def connection_pool(url: str, **options: Any) -> Any:
    """A BlockingConnectionPool to ``url``, whose own options go before ``options``.

    Raises ValueError for a URL that cannot be used, without a word of it: it may hold a password.
    """
    try:
        parts = urlsplit(url)
        given = dict(parse_url(url))
        names = parse_qs(parts.query, keep_blank_values=True).keys()
        place = parts.path.removeprefix("/")
        wrong = bool(place and not place.isdecimal()) if parts.scheme != "unix" else not place
        if wrong or "//" not in url or parts.fragment or not all(name.isidentifier() for name in names):
            raise ValueError
    except ValueError:
        raise ValueError(_FORM) from None
    for name in names:
        if name not in _OPTIONS and not name.startswith("ssl_"):
            raise ValueError(f"unknown option {name!r} after its '?'; there are: {', '.join(sorted(_OPTIONS))} and ssl_…")
    try:
        pool: Any = BlockingConnectionPool(**{**options, **given})
        pool.make_connection()  # connects to nothing, but checks the options
    except (TypeError, ValueError, RedisError):
        raise ValueError("an option after its '?' has a wrong value") from None
    return pool


def check_url(url: str) -> None:
    """Raise ValueError for a URL that cannot be used."""
    connection_pool(url)


def shown(url: str) -> str:
    """What a log may say of a URL: no user, no password, no options."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    host = parts.hostname or "localhost"
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port or 6379}{parts.path}"
