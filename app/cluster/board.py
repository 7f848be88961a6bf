"""Which replicas there are, as this process's routers know them.

Ray Serve makes routers itself and hands them to nobody, so they leave word here. It sends a router's class as a value, globals
included: what is to be shared stands in a module of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

_KNOWN: dict[str, tuple[str, ...]] = {}


def note(deployment: str, replicas: Iterable[str]) -> None:
    """A deployment's replicas are these."""
    _KNOWN[deployment] = tuple(replicas)


def replicas_of(deployment: str) -> tuple[str, ...]:
    """The names of a deployment's running replicas; empty before anything was asked of it."""
    return _KNOWN.get(deployment, ())
