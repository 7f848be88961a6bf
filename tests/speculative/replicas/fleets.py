"""Replicas in this process, which can be killed at any moment."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from speculative.async_engine import AsyncEngine
from speculative.config import ModelInfo
from speculative.errors import EngineError, ReplicaLostError
from speculative.replicas.host import answer
from speculative.replicas.inboxes import Inbox, Inboxes
from speculative.replicas.loads import Loads
from speculative.replicas.messages import ReplicaState, Told, Wish
from speculative.replicas.outboxes import Outboxes
from speculative.replicas.routing import rank
from speculative.request import OfferedTree, Request

INGRESS = "ingress"


@dataclass
class Replica:
    engine: AsyncEngine
    outboxes: Outboxes = field(default_factory=lambda: Outboxes(gather_s=0))
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def begin(self, name: str, request: Request, wish: Wish, inbox: Inbox) -> asyncio.Task[None]:
        def ended(task: asyncio.Task[None]) -> None:
            self.tasks.discard(task)
            if task.cancelled():  # perhaps before it ran at all
                inbox.fail(ReplicaLostError("killed", name))

        task = asyncio.create_task(self._answer(name, request, wish))
        self.tasks.add(task)
        task.add_done_callback(ended)
        return task

    async def _answer(self, name: str, request: Request, wish: Wish) -> None:
        async with aclosing(answer(name, self.engine.info, self.engine.generate, request, wish)) as messages:
            async for told in messages:
                self.outboxes.put(INGRESS, told)


class LocalFleet:
    """Engines under names; one that is killed answers nobody, and its engine goes on under another name when it is revived."""

    def __init__(self, engines: list[AsyncEngine]) -> None:
        self._numbers = itertools.count()
        self.replicas: dict[str, Replica] = {}
        self.loads = Loads()
        self.placed: list[tuple[str, str]] = []
        self.asked: list[Request] = []
        self._inboxes = Inboxes()
        self._changed: Callable[[], None] = lambda: None
        self._more = asyncio.Condition()
        self.engines = engines
        self.failure: EngineError | None = None

    async def start(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        for engine in self.engines:
            await engine.start()
            await engine.wait_ready()
            await self.add(engine)

    async def stop(self) -> None:
        for task in [task for replica in self.replicas.values() for task in replica.tasks]:
            task.cancel()
        for engine in self.engines:
            await engine.stop()

    async def add(self, engine: AsyncEngine) -> str:
        name = f"replica-{next(self._numbers)}"
        async with self._more:
            replica = self.replicas[name] = Replica(engine)
            replica.tasks.add(asyncio.create_task(self._listen(replica)))
            self._changed()
            self._more.notify_all()
        return name

    def kill(self, name: str) -> AsyncEngine:
        replica = self.replicas.pop(name)
        for task in replica.tasks:
            task.cancel()
        self._changed()
        return replica.engine

    @property
    def states(self) -> dict[str, ReplicaState]:
        return {name: self._state(each.engine) for name, each in self.replicas.items()}

    def _state(self, engine: AsyncEngine) -> ReplicaState:
        info: ModelInfo = engine.info
        return ReplicaState("none", info, engine.remote, engine.status(), engine.ready, engine.alive, engine.busy_seconds)

    async def generate(self, request: Request, wish: Wish) -> AsyncGenerator[Told, None]:
        async with self._more:
            await self._more.wait_for(lambda: rank(wish, self._loads()))
            name = rank(wish, self._loads())[0]
        replica = self.replicas[name]
        self.loads.begin(request.request_id)
        self.loads.place(request.request_id, name)
        self.placed.append((request.request_id, name))
        self.asked.append(request)
        with self._inboxes.opened(request.request_id) as inbox:
            call = replica.begin(name, request, wish, inbox)
            try:
                async with aclosing(inbox.messages()) as messages:
                    async for told in messages:
                        yield told
            finally:
                self.loads.end(request.request_id)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)

    async def _listen(self, replica: Replica) -> None:
        async for messages in replica.outboxes.listen(INGRESS):
            self._inboxes.deal(messages)

    def _loads(self) -> dict[str, int]:
        return {name: self.loads.of(name) for name in self.replicas}

    def give_up(self, request_id: str, error: EngineError) -> None:
        self._inboxes.fail(request_id, error)

    async def offer(self, replica: str, request_id: str, tree: OfferedTree) -> None:
        if replica not in self.replicas:
            raise ReplicaLostError("killed", replica)
        try:
            await self.replicas[replica].engine.offer(request_id, tree)
        except EngineError:
            if replica not in self.replicas:
                raise ReplicaLostError("killed", replica) from None
            raise
