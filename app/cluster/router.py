"""AffinityRouter: Ray Serve's request router for engines; where a request goes is for `speculative.replicas.routing` to say."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from app.cluster import board
from speculative.replicas.messages import Wish
from speculative.replicas.routing import SLACK, rank


class AffinityRouter(RequestRouter):
    """Goes by the ``wish`` of a call (`Wish`) and by how many requests each replica has.

    Serve's own count of calls will not do: it was seen to say 4 of a replica that had 12, and then 17 requests were at one and 4 at
    another.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """``slack``: see `rank`."""
        self._slack: float = kwargs.get("slack", SLACK)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas to try, one after the other: of a group of several Serve would take the one that it counts fewest calls of."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        wish = pending_request.kwargs.get("wish", Wish()) if pending_request is not None else Wish()
        loads = board.loads_of(self._deployment_id.name)
        names = rank(wish, {name: loads.of(name) for name in by_name}, self._slack)
        if names and wish.request_id:
            loads.place(wish.request_id, names[0])
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [[by_name[name]] for name in names]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve says who there is."""
        super().update_replicas(replicas)
        self._note()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A replica was found dead before Serve knew."""
        super().on_replica_actor_died(replica_id)
        self._note()

    def _note(self) -> None:
        board.note(self._deployment_id.name, (replica_id.unique_id for replica_id in self.curr_replicas))


def router_config(**kwargs: Any) -> dict[str, Any]:
    """For a deployment's ``request_router_config``."""
    return {"request_router_class": f"{__name__}.{AffinityRouter.__name__}", "request_router_kwargs": kwargs}
