"""EngineReplica: an engine as a Ray Serve deployment."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from ray import serve

from app.cluster_settings import ReplicaSettings
from app.logs import configure
from app.sessions.conversations import Conversations
from app.sessions.observing import Unobserved
from app.sessions.opening import Stores
from app.watchdog import ailment
from speculative.async_engine import AsyncEngine
from speculative.errors import EngineError
from speculative.replicas.host import answer
from speculative.replicas.messages import Failure, ReplicaState, Told, Wish
from speculative.replicas.outboxes import Outboxes
from speculative.request import OfferedTree, Request, RequestOutput


class EngineReplica:
    """One engine and its store of key-value cache. ``given`` are settings (`ClusterSettings.given`).

    Every method's ``wish`` is for the router that chooses the replica.
    """

    async def __init__(self, given: Mapping[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._settings = settings = ReplicaSettings(**given)
        configure(settings.log_level, settings.log_format)
        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._outboxes = Outboxes()
        self._asked: Counter[str] = Counter()
        self._engine = AsyncEngine.from_config(settings.engine_config())
        self._stores = Stores.of(settings, Unobserved())
        self._conversations = Conversations(self._engine, self._stores.blocks) if self._stores.blocks is not None else None
        self._stores.start()
        await self._engine.start()
        await self._engine.wait_ready()

    async def generate(self, request: Request, listener: str, wish: Wish) -> None:
        """Answer a request; all messages about it are for ``listener``. Returns once the last one is put there."""
        self._asked[listener] += 1
        try:
            async with aclosing(answer(self._name, self._engine.info, self._run, request, wish)) as messages:
                async for told in messages:
                    self._outboxes.put(listener, told)
        finally:
            self._asked -= Counter((listener,))

    async def listen(self, listener: str, wish: Wish) -> AsyncGenerator[tuple[Told, ...], None]:
        """All messages for ``listener``; see `Outboxes.listen`."""
        async with aclosing(self._outboxes.listen(listener)) as gathered:
            async for messages in gathered:
                yield messages

    async def _run(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        conversations = self._conversations
        if conversations is not None:
            await conversations.restore([request])
        generated: list[int] = []
        try:
            async with aclosing(self._engine.generate(request)) as outputs:
                async for output in outputs:
                    generated += output.new_token_ids
                    yield output
        finally:
            if conversations is not None:
                conversations.keep(request, generated)

    async def offer(self, request_id: str, tree: OfferedTree, wish: Wish) -> Failure | None:
        """Let a remote request go on; why it cannot."""
        try:
            await self._engine.offer(request_id, tree)
        except EngineError as error:
            return Failure.of(error)
        return None

    async def state(self, listener: str, wish: Wish) -> tuple[str, ReplicaState]:
        """This replica's name, and how it is for ``listener``."""
        engine = self._engine
        return self._name, ReplicaState(
            self._settings.model,
            engine.info,
            engine.remote,
            engine.status(),
            engine.ready,
            engine.alive,
            engine.busy_seconds,
            os.getpid(),
            self._asked.total() - self._asked[listener],
        )

    def check_health(self) -> None:
        """Serve puts another replica in the place of one that raises here."""
        if said := ailment(self._engine, self._settings.watchdog_timeout):
            raise RuntimeError(said)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `autoscaling.wanted_replicas` goes by."""
        status = self._engine.status()
        return {
            "running": float(status.num_running),
            "waiting": float(status.num_waiting),
            "slots": float(self._settings.max_num_seqs),
            "kv": status.kv_cache_usage,
        }

    async def __del__(self) -> None:
        """Serve has waited for the running texts, or for as long as it may: what still runs is aborted, and goes on elsewhere."""
        if hasattr(self, "_stores"):
            await self._engine.stop()
            if self._conversations is not None:
                await self._conversations.close(2.0)
            await self._stores.close()
