"""Which replicas there are, as this process's routers know them, and how busy, as those know who ask them.

Ray Serve makes routers itself and hands them to nobody, so word is left here. It sends a router's class as a value, globals
included: what is to be shared stands in a module of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from speculative.replicas.loads import Loads

_KNOWN: dict[str, tuple[str, ...]] = {}
_LOADS: dict[str, Loads] = {}


def note(deployment: str, replicas: Iterable[str]) -> None:
    """A deployment's replicas are these."""
    _KNOWN[deployment] = tuple(replicas)


def replicas_of(deployment: str) -> tuple[str, ...]:
    """The names of a deployment's running replicas; empty before anything was asked of it."""
    return _KNOWN.get(deployment, ())


def loads_of(deployment: str) -> Loads:
    """How busy a deployment's replicas are."""
    return _LOADS.setdefault(deployment, Loads())
