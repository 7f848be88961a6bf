"""What sessions are served with: an engine, a way to run a text, limits, and somebody who counts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from speculative.config import EngineStatus, ModelInfo, RemoteInfo
from speculative.remote.limits import Limits
from speculative.request import OfferedTree, Request, RequestOutput

Direction = Literal["received", "sent"]
Verified = Literal["verified", "left", "repeated"]
"""A tree that the target has seen, one that the text had left, one whose step had been verified before."""

Generate = Callable[[Request], AsyncGenerator[RequestOutput, None]]
"""Runs a text with all that a server does for one: queue, metrics, cache. Of what it raises ProtocolError is told as it is."""


class RemoteEngine(Protocol):
    """The part of `speculative.async_engine.AsyncEngine` that sessions need beside `Generate`."""

    @property
    def ready(self) -> bool:
        """True when requests are taken."""

    @property
    def info(self) -> ModelInfo:
        """The loaded model; EngineNotReadyError until then."""

    @property
    def remote(self) -> RemoteInfo:
        """What those who draft elsewhere are told; EngineNotReadyError until the model is loaded."""

    def status(self) -> EngineStatus:
        """How many requests run and wait."""

    def offer_soon(self, request_id: str, tree: OfferedTree, refused: Callable[[Exception], None]) -> None:
        """Let a text go on with a tree; ``refused`` is told if it cannot be verified."""


class Observer(Protocol):
    """Is told what happens, to count it."""

    def connected(self, change: int) -> None:
        """A connection has come (1) or gone (−1)."""

    def session(self, change: int) -> None:
        """A session has been opened (1) or forgotten (−1)."""

    def resumed(self) -> None:
        """A session goes on on another connection."""

    def verified(self, outcome: Verified) -> None:
        """A tree has been answered."""

    def carried(self, direction: Direction, size: int) -> None:
        """Bytes have been received or sent, headers of WebSocket and below left out."""

    def refused(self, code: str) -> None:
        """An edge was told an error."""


@dataclass(frozen=True, slots=True)
class Host:
    """``limits`` are those before a model is known; ``model_name`` is what its clients call it."""

    engine: RemoteEngine
    observer: Observer
    model_name: Callable[[], str]
    limits: Limits
    idle_seconds: float
