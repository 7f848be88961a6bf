"""Replicas in this process, which can be killed at any moment."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from speculative.async_engine import AsyncEngine
from speculative.config import ModelInfo
from speculative.errors import EngineError, ReplicaLostError
from speculative.replicas.host import answer
from speculative.replicas.messages import ReplicaState, Told, Wish
from speculative.replicas.routing import rank
from speculative.request import OfferedTree, Request


@dataclass
class Replica:
    engine: AsyncEngine
    killed: asyncio.Event = field(default_factory=asyncio.Event)


class LocalFleet:
    """Engines under names; one that is killed answers nobody, and its engine goes on under another name when it is revived."""

    def __init__(self, engines: list[AsyncEngine]) -> None:
        self._numbers = itertools.count()
        self.replicas: dict[str, Replica] = {}
        self.loads: Counter[str] = Counter()
        self.placed: list[tuple[str, str]] = []
        self.asked: list[Request] = []
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
        for engine in self.engines:
            await engine.stop()

    async def add(self, engine: AsyncEngine) -> str:
        name = f"replica-{next(self._numbers)}"
        async with self._more:
            self.replicas[name] = Replica(engine)
            self._changed()
            self._more.notify_all()
        return name

    def kill(self, name: str) -> AsyncEngine:
        replica = self.replicas.pop(name)
        replica.killed.set()
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
            name = rank(wish, self._loads())[0][0]
        replica = self.replicas[name]
        self.loads[name] += 1
        self.placed.append((request.request_id, name))
        self.asked.append(request)
        try:
            async with aclosing(answer(name, replica.engine.info.target, replica.engine.generate, request, wish, 0)) as messages:
                while (told := await self._next(messages, replica, name)) is not None:
                    yield told
        finally:
            self.loads[name] -= 1

    def _loads(self) -> dict[str, float]:
        return {name: self.loads[name] for name in self.replicas}

    async def _next(self, messages: AsyncGenerator[Told, None], replica: Replica, name: str) -> Told | None:
        coming = asyncio.create_task(_next(messages))
        dying = asyncio.ensure_future(replica.killed.wait())
        try:
            await asyncio.wait({coming, dying}, return_when=asyncio.FIRST_COMPLETED)
            if replica.killed.is_set():
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
                raise ReplicaLostError("killed", name)
            return coming.result()
        finally:
            dying.cancel()
            if not coming.done():
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)

    async def offer(self, replica: str, request_id: str, tree: OfferedTree) -> None:
        if replica not in self.replicas:
            raise ReplicaLostError("killed", replica)
        try:
            await self.replicas[replica].engine.offer(request_id, tree)
        except EngineError:
            if replica not in self.replicas:
                raise ReplicaLostError("killed", replica) from None
            raise


async def _next(messages: AsyncGenerator[Told, None]) -> Told | None:
    async for told in messages:
        return told
    return None
