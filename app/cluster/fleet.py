"""RayFleet: the replicas of a Ray Serve deployment."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, Final, cast

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from app.cluster.board import replicas_of
from speculative.errors import EngineError, EngineLoadError, EngineStepError, ReplicaLostError
from speculative.replicas.messages import ReplicaState, Told, Wish
from speculative.request import OfferedTree, Request

logger = logging.getLogger("moaserve.replicas")

ASK_S: Final = 0.5
"""Seconds between two looks at the replicas."""

ANSWER_S: Final = 5.0
"""Seconds that a replica has to say how it is."""


class RayFleet:
    """Engines of a deployment. ``open`` brings its handle once it is deployed, ``close`` ends what that has begun."""

    def __init__(self, open: Callable[[], Awaitable[DeploymentHandle[Any]]], close: Callable[[], Awaitable[None]]) -> None:
        self._open, self._close = open, close
        self._handle: DeploymentHandle[Any] | None = None
        self._states: dict[str, ReplicaState] = {}
        self._changed: Callable[[], None] = lambda: None
        self._looking: asyncio.Task[None] | None = None
        self._asking: dict[str, asyncio.Task[None]] = {}
        self.failure: EngineError | None = None

    async def start(self, changed: Callable[[], None]) -> None:
        """As in Fleet."""
        self._changed = changed
        self._looking = asyncio.create_task(self._look())

    async def stop(self) -> None:
        """As in Fleet."""
        tasks = [task for task in (self._looking, *self._asking.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._close()

    @property
    def states(self) -> Mapping[str, ReplicaState]:
        """As in Fleet."""
        return self._states

    async def generate(self, request: Request, wish: Wish) -> AsyncGenerator[Told, None]:
        """As in Fleet."""
        response = cast("DeploymentResponseGenerator[Told]", _called(self._deployed().generate, request, wish=wish))
        ended, replica = False, ""
        try:
            async for told in response:
                replica = told.replica
                yield told
            ended = True
        except RayTaskError as error:
            ended = True
            logger.exception("a replica failed")
            raise EngineStepError(f"the replica failed: {error}") from error
        except (RayError, RayServeException) as error:
            ended = True
            raise ReplicaLostError(str(error).splitlines()[0], replica) from error
        finally:
            if not ended:
                response.cancel()

    async def offer(self, replica: str, request_id: str, tree: OfferedTree) -> None:
        """As in Fleet."""
        if replica not in replicas_of(self._deployed().deployment_name):
            raise ReplicaLostError("the replica is gone", replica)
        try:
            failure = await _called(self._unary().offer, request_id, tree, wish=Wish(only=replica))
        except (RayError, RayServeException) as error:
            raise ReplicaLostError(str(error).splitlines()[0], replica) from error
        if failure is not None:
            raise failure.error

    def _deployed(self) -> DeploymentHandle[Any]:
        assert self._handle is not None, "nothing is asked before a replica has answered"
        return self._handle

    def _unary(self) -> DeploymentHandle[Any]:
        return self._deployed().options(stream=False)

    async def _look(self) -> None:
        try:
            handle = await self._open()
        except Exception as error:
            self.failure = EngineLoadError(str(error) or type(error).__name__)
            self._changed()
            return
        self._handle = handle.options(stream=True)
        while True:
            names = replicas_of(handle.deployment_name)
            gone = [name for name in self._states if name not in names]
            for name in gone:
                del self._states[name]
            if gone:
                self._changed()
            for name in names or ("",):
                if name not in self._asking:
                    self._asking[name] = asyncio.create_task(self._ask(name))
            await asyncio.sleep(ASK_S)

    async def _ask(self, name: str) -> None:
        """What a replica says of itself; of any replica where no ``name`` is known yet."""
        try:
            response = cast("DeploymentResponse[tuple[str, ReplicaState]]", _called(self._unary().state, wish=Wish(only=name)))
            try:
                found, state = await asyncio.wait_for(response, ANSWER_S)
                self._states[found] = state
            except (asyncio.TimeoutError, TimeoutError):
                response.cancel()
                self._states.pop(name, None)
            except (RayError, RayServeException):
                self._states.pop(name, None)
            self._changed()
        finally:
            del self._asking[name]


def _called(method: DeploymentHandle[Any], *arguments: Any, **named: Any) -> Any:
    """The response to a call that Serve takes for a request of its own.

    All calls made for one HTTP request have its id otherwise, and of those that wait for a replica at once (choices of a prompt,
    an edge's text and its trees) a router would answer one for another, and forget one.
    """
    return contextvars.Context().run(method.remote, *arguments, **named)
