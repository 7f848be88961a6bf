"""Fleet: several engines that are elsewhere, as the one that gives them work sees them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Protocol

from speculative.errors import EngineError
from speculative.replicas.messages import ReplicaState, Told, Wish
from speculative.request import OfferedTree, Request


class Fleet(Protocol):
    """Replicas come and go, and each has a name that none after it has."""

    async def start(self, changed: Callable[[], None]) -> None:
        """Begin to look at the replicas; ``changed`` is called on this event loop whenever ``states`` says something else."""

    async def stop(self) -> None:
        """Look no more."""

    @property
    def failure(self) -> EngineError | None:
        """Why there will be no replica."""

    @property
    def states(self) -> Mapping[str, ReplicaState]:
        """Those that can be reached, as they were when last asked."""

    def generate(self, request: Request, wish: Wish) -> AsyncGenerator[Told, None]:
        """Give a request to a replica, once there is one for it; closing the generator aborts it there.

        Raises ReplicaLostError where the replica is lost before the last output.
        """

    def give_up(self, request_id: str, error: EngineError) -> None:
        """Have ``generate`` raise ``error`` after what it has been told, if that request is under way."""

    async def offer(self, replica: str, request_id: str, tree: OfferedTree) -> None:
        """Let a remote request of a replica go on; raises InvalidRequestError, or ReplicaLostError.

        Where it raises that, ``generate`` does so too.
        """
