"""RayFleet: the replicas of a Ray Serve deployment."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final, cast

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator

from app.cluster.board import loads_of, replicas_of
from speculative.errors import EngineError, EngineLoadError, EngineStepError, ReplicaLostError
from speculative.replicas.inboxes import Inbox, Inboxes
from speculative.replicas.messages import Failure, ReplicaState, Told, Wish
from speculative.request import OfferedTree, Request
from speculative.waiting import ended, set_within

logger = logging.getLogger("moaserve.replicas")

LOOK_S: Final = 0.5
"""Seconds between two looks at which replicas there are."""

ASK_S: Final = 2.0
"""Seconds after which a replica is asked again how it is. Being asked costs it and the ingress as much as a text's beginning."""

ANSWER_S: Final = 5.0
"""Seconds that a replica has to say how it is, and that its last message may be under way."""


class RayFleet:
    """Engines of a deployment. ``open`` brings its handle once it is deployed, ``close`` ends what that has begun.

    A text is a call that lasts as long as the text does and returns nothing: what is said of all texts at a replica comes as
    one stream, since Ray takes some milliseconds for a message whatever is in it.
    """

    def __init__(self, open: Callable[[], Awaitable[DeploymentHandle[Any]]], close: Callable[[], Awaitable[None]]) -> None:
        self._open, self._close = open, close
        self._handle: DeploymentHandle[Any] | None = None
        self._states: dict[str, ReplicaState] = {}
        self._changed: Callable[[], None] = lambda: None
        self._looking: asyncio.Task[None] | None = None
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._listener = secrets.token_hex(8)
        self._listening: dict[str, asyncio.Task[None]] = {}
        self._gone_since: dict[str, float] = {}
        self._inboxes = Inboxes()
        self.failure: EngineError | None = None

    async def start(self, changed: Callable[[], None]) -> None:
        """As in Fleet."""
        self._changed = changed
        self._looking = asyncio.create_task(self._look())

    async def stop(self) -> None:
        """As in Fleet."""
        if self._looking is not None:
            await ended({self._looking})  # it starts the others
        await ended({*self._asking.values(), *self._listening.values(), *self._calls})
        await self._close()

    @property
    def states(self) -> Mapping[str, ReplicaState]:
        """As in Fleet."""
        return self._states

    async def generate(self, request: Request, wish: Wish) -> AsyncGenerator[Told, None]:
        """As in Fleet."""
        loads = loads_of(self._deployed().deployment_name)
        with self._inboxes.opened(request.request_id) as inbox:
            loads.begin(request.request_id)
            call = asyncio.create_task(self._call(request, wish, inbox))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
            try:
                async with aclosing(inbox.messages()) as messages:
                    async for told in messages:
                        if told.output is None:  # Serve may have found that the first choice is gone
                            loads.place(request.request_id, told.replica)
                        if told.is_last:  # the router is to know that there is room before whoever reads this asks anew
                            loads.end(request.request_id)
                        yield told
            finally:
                loads.end(request.request_id)
                if not inbox.has_ended.is_set():
                    call.cancel()

    async def _call(self, request: Request, wish: Wish, inbox: Inbox) -> None:
        """Have a replica answer; how that fails is for the inbox."""
        response = _called(self._unary().generate, request, self._listener, wish=wish)
        try:
            await response
            if not await set_within(inbox.has_ended, ANSWER_S):
                inbox.fail(ReplicaLostError("the replica's last message has not come", inbox.replica))
        except asyncio.CancelledError:
            response.cancel()
            inbox.fail(ReplicaLostError("the call was cancelled", inbox.replica))
            raise
        except Exception as error:
            if isinstance(error, RayError | RayServeException) and not isinstance(error, RayTaskError):
                inbox.fail(ReplicaLostError(str(error).splitlines()[0], inbox.replica))
            else:
                logger.exception("a replica failed")
                inbox.fail(EngineStepError(f"the replica failed: {error}"))

    def give_up(self, request_id: str, error: EngineError) -> None:
        """As in Fleet."""
        self._inboxes.fail(request_id, error)

    async def offer(self, replica: str, request_id: str, tree: OfferedTree) -> None:
        """As in Fleet.

        Serve lets a replica that it replaces finish its calls, and takes no new ones for it: a text that waits for trees can only
        move.
        """
        try:
            failure = await self._offered(replica, request_id, tree)
        except ReplicaLostError as error:
            self._inboxes.fail(request_id, error)
            raise
        if failure is not None:
            raise failure.error

    async def _offered(self, replica: str, request_id: str, tree: OfferedTree) -> Failure | None:
        if replica not in replicas_of(self._deployed().deployment_name):
            raise ReplicaLostError("the replica is gone", replica)
        try:
            return cast("Failure | None", await _called(self._unary().offer, request_id, tree, wish=Wish(only=replica)))
        except (RayError, RayServeException) as error:
            raise ReplicaLostError(str(error).splitlines()[0], replica) from error

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
                if name and name not in self._listening:
                    self._listening[name] = asyncio.create_task(self._listen(name))
            self._leave({name for name in self._listening if name not in names})
            await asyncio.sleep(LOOK_S)

    def _leave(self, gone: set[str]) -> None:
        """Listen no more to replicas that get no more texts and have ended theirs; Serve lets them live as long as we do listen."""
        now = time.monotonic()
        self._gone_since = {name: self._gone_since.get(name, now) for name in gone}
        for name, since in self._gone_since.items():
            if not self._inboxes.expect(name, since):
                self._listening[name].cancel()

    async def _listen(self, name: str) -> None:
        """Deal out what a replica says, until it is lost or left."""
        response = _called(self._deployed().listen, self._listener, wish=Wish(only=name))
        stream = cast("DeploymentResponseGenerator[tuple[Told, ...]]", response)
        try:
            await asyncio.wait_for(anext(stream), ANSWER_S)
            async for messages in stream:
                self._inboxes.deal(messages)
        except (asyncio.TimeoutError, StopAsyncIteration, RayError, RayServeException) as error:
            logger.debug("replica %s says no more: %r", name, error)
        except Exception:
            logger.exception("what replica %s says cannot be read", name)
        finally:
            response.cancel()
            self._inboxes.lost(name)
            del self._listening[name]

    async def _ask(self, name: str) -> None:
        """What a replica says of itself, and a pause; of any replica where no ``name`` is known yet."""
        try:
            called = _called(self._unary().state, self._listener, wish=Wish(only=name))
            response = cast("DeploymentResponse[tuple[str, ReplicaState]]", called)
            try:
                found, state = await asyncio.wait_for(response, ANSWER_S)
                self._states[found] = state
                loads_of(self._deployed().deployment_name).hear({each: told.others for each, told in self._states.items()})
            except (asyncio.TimeoutError, TimeoutError):
                response.cancel()
                self._states.pop(name, None)
            except (RayError, RayServeException):
                self._states.pop(name, None)
            self._changed()
            if name in self._states:
                await asyncio.sleep(ASK_S)
        finally:
            del self._asking[name]


def _called(method: DeploymentHandle[Any], *arguments: Any, **named: Any) -> Any:
    """The response to a call that Serve takes for a request of its own.

    All calls made for one HTTP request have its id otherwise, and of those that wait for a replica at once (choices of a prompt,
    an edge's text and its trees) a router would answer one for another, and forget one.
    """
    return contextvars.Context().run(method.remote, *arguments, **named)
