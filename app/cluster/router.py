"""AffinityRouter: Ray Serve's request router for engines; where a request goes is for `speculative.replicas.routing` to say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from app.cluster import board
from speculative.replicas.messages import Wish
from speculative.replicas.routing import SLACK, rank


class AffinityRouter(RequestRouter):
    """Goes by the ``wish`` of a call (`Wish`) and by how many calls each replica has."""

    def initialize_state(self, **kwargs: Any) -> None:
        """``slack``: see `rank`."""
        self._slack: float = kwargs.get("slack", SLACK)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas to try, one after the other."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        wish = pending_request.kwargs.get("wish", Wish()) if pending_request is not None else Wish()
        groups = rank(wish, self._loads(by_name), self._slack)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [[by_name[name] for name in group] for group in groups]

    def _loads(self, replicas: Mapping[str, RunningReplica]) -> dict[str, float]:
        cache = self.replica_queue_len_cache
        return {name: float(cache.get(replica.replica_id) or 0) for name, replica in replicas.items()}

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
