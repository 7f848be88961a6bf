"""ReplicatedEngine: several engines as one, and no text lost with any of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Final, NoReturn

from transformers import PreTrainedTokenizerBase

from speculative.config import EngineStatus, ModelInfo, RemoteInfo
from speculative.errors import (
    SHUTTING_DOWN,
    EngineError,
    EngineLoadError,
    EngineNotReadyError,
    EngineStepError,
    InvalidRequestError,
    ReplicaLostError,
)
from speculative.garbage import keep_what_is_loaded
from speculative.prefix_cache import extend_keys
from speculative.replicas.affinity import Affinity
from speculative.replicas.continuing import Continuation
from speculative.replicas.fleet import Fleet
from speculative.replicas.messages import ReplicaState, Told, Wish
from speculative.replicas.models import ServedModel
from speculative.replicas.summing import sum_of
from speculative.request import Grammar, OfferedTree, Request, RequestOutput
from speculative.waiting import for_ever, set_within, within

logger = logging.getLogger("moaserve.replicas")

MOST_LOSSES: Final = 6
"""Replicas that a request may lose one after the other without a token: more likely it is the request that ends them."""


class ReplicatedEngine:
    """Serves with the engines of a fleet; as `async_engine.AsyncEngine` seen from HTTP, and from edges.

    Of each text it keeps what was told. When its replica dies or stops, another is asked to go on: there is a pause, then the same
    text. A request waits up to ``patience`` seconds for a replica. ``load`` reads what is needed here of a replica's model.

    Replicas may be replaced by others with another drafter, or another target: new texts are for the target that has come last,
    and those that were begun stay with theirs.
    """

    def __init__(
        self, fleet: Fleet, patience: float = 60.0, load: Callable[[ReplicaState], ServedModel] = ServedModel.load
    ) -> None:
        self._fleet, self._patience, self._load = fleet, patience, load
        self._models: dict[str, ServedModel] = {}  # by target; the one that came last is the last
        self._seen: list[str] = []
        self._loading: asyncio.Task[None] | None = None
        self._load_error: EngineError | None = None
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._affinity = Affinity()
        self._known_replicas: set[str] = set()
        self._streams: dict[str, Continuation] = {}
        self._offers: set[asyncio.Task[None]] = set()
        self._draining = self._over = self._started = self._stopped = False
        self._lacking_since: float | None = None
        self.num_failovers = 0
        self.num_near = 0
        self.num_placed = 0

    async def start(self) -> None:
        """Begin to look for replicas. Returns at once."""
        self._started = True
        await self._fleet.start(self._changed)

    async def wait_ready(self) -> None:
        """Return once a replica serves; raises EngineLoadError where its tokenizer cannot be loaded here."""
        await self._ready.wait()
        if self._load_error is not None:
            raise self._load_error

    async def wait_lost(self) -> NoReturn:
        """As in AsyncEngine; replicas that are lost are replaced, so nothing is lost for good."""
        await for_ever()

    async def stop(self) -> None:
        """Give no more work, and look at no replica any more."""
        self._draining = self._stopped = True
        for task in (*self._offers, *((self._loading,) if self._loading else ())):
            task.cancel()
        await self._fleet.stop()

    async def drain(self, timeout: float) -> bool:
        """As in AsyncEngine."""
        self._draining = True
        ended = await set_within(self._idle, timeout)
        self._over = True
        for request_id in list(self._streams):
            self._fleet.give_up(request_id, EngineNotReadyError(SHUTTING_DOWN))
        return ended

    @property
    def replicas(self) -> Mapping[str, ReplicaState]:
        """Those that can be reached, by name."""
        return self._fleet.states

    @property
    def ready(self) -> bool:
        """True when requests are taken: there is a replica, or was ``patience`` seconds ago, so that one is to be expected."""
        lacking = 0.0 if self._lacking_since is None else time.monotonic() - self._lacking_since
        return bool(self._models) and not self._draining and self.alive and lacking < self._patience

    @property
    def alive(self) -> bool:
        """True until it is stopped, or a tokenizer cannot be loaded; replicas that die are for others to replace."""
        return self._started and not self._stopped and self._load_error is None

    @property
    def busy_seconds(self) -> float:
        """How long the replica has been at its present step that came to it last: 0 while any of them gets on."""
        return min((state.busy_seconds for state in self.replicas.values()), default=0.0)

    @property
    def info(self) -> ModelInfo:
        """The model that new texts are for; EngineNotReadyError until a replica serves one."""
        return self._model().info

    @property
    def remote(self) -> RemoteInfo:
        """What those who draft elsewhere are told; EngineNotReadyError until a replica serves."""
        return self._model().remote

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """That model's tokenizer; EngineNotReadyError until a replica serves one."""
        tokenizer = self._model().tokenizer
        if tokenizer is None:
            raise InvalidRequestError("this model has no tokenizer: put its tokenizer.json beside its weights")
        return tokenizer

    def status(self) -> EngineStatus:
        """The load of all replicas together."""
        return sum_of([state.status for state in self.replicas.values()])

    def validate(self, request: Request) -> None:
        """Raise what ``generate`` would, before anything is started."""
        if self._draining:
            raise EngineNotReadyError(SHUTTING_DOWN)
        self._model().validate(request)

    def check_grammar(self, grammar: Grammar) -> None:
        """As `Texts.check_grammar`."""
        self._model().texts.check_grammar(grammar)

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request until it ends, from one replica after another if need be; closing this aborts the request."""
        self.validate(request)
        if request.request_id in self._streams:
            raise EngineError(f"request id {request.request_id!r} is already in use")
        model = self._model()
        stream = self._streams[request.request_id] = Continuation(request, model.row_bytes(request))
        self._idle.clear()
        try:
            # Memory means something to the drafter alone that it is of.
            wish = Wish(model.info.target, pair=model.info.pair if request.memory is not None else "")
            async with aclosing(self._written(stream, wish)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            del self._streams[request.request_id]
            if not self._streams:
                self._idle.set()

    async def _written(self, stream: Continuation, wish: Wish) -> AsyncGenerator[RequestOutput, None]:
        avoid: set[str] = set()
        losses, failures, length = 0, 0, stream.length
        cause: EngineError
        while not self._over:
            try:
                async with aclosing(self._placed(stream, wish, avoid)) as outputs:
                    async for output in outputs:
                        yield output
                        if output.finish_reason is not None:
                            return
                raise ReplicaLostError("the replica has ended its answer too early", stream.replica)
            except ReplicaLostError as error:
                losses = losses + 1 if stream.length == length else 1
                lost, cause = error.replica or stream.replica, error
            except EngineStepError as error:
                # A step that failed there may succeed elsewhere, once: a request that fails everywhere is not to fail others.
                failures += 1
                if failures > 1 or not self._others(wish, avoid | {stream.replica}):
                    raise
                lost, cause = stream.replica, error
            if losses > MOST_LOSSES:
                raise EngineStepError(f"{losses} replicas were lost one after the other while they had this request") from cause
            logger.warning("request %s goes on elsewhere at token %d: %s", stream.request.request_id, stream.length, cause)
            self.num_failovers += 1
            length = stream.length
            avoid |= {lost} - {""}
            stream.lost()
        raise EngineNotReadyError(SHUTTING_DOWN)

    def _others(self, wish: Wish, avoid: set[str]) -> bool:
        return any(name not in avoid and wish.fits(state.info) for name, state in self.replicas.items())

    async def _placed(self, stream: Continuation, wish: Wish, avoid: set[str]) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one replica; raises ReplicaLostError where it does not end the text."""
        request = stream.request
        keys: list[bytes] = []
        extend_keys(keys, request.given_token_ids, request.cache_salt)
        near = self._affinity.near(keys, request.session)
        others = {name for name, state in self.replicas.items() if not wish.fits(state.info)}
        if wish.pair and others and len(others) == len(self.replicas):
            raise EngineNotReadyError("all replicas have another target or drafter by now")
        wish = replace(wish, near=near, avoid=frozenset(avoid | others), request_id=request.request_id)
        async with aclosing(self._fleet.generate(request, wish)) as messages:
            told = await self._first(messages)
            self.num_placed += 1
            self.num_near += told.replica in near
            self._affinity.learn(keys, told.replica, request.session)
            stream.placed(told.replica, told.time)
            while True:
                if (output := told.output) is not None:
                    if output.finish_reason == "abort":  # nobody here has asked for it
                        raise ReplicaLostError("the replica stops", told.replica)
                    yield stream.take(output)
                    if output.finish_reason is not None:
                        extend_keys(keys, (*request.prompt_token_ids, *stream.tokens), request.cache_salt)
                        self._affinity.learn(keys, told.replica, request.session)
                        return
                if told.failure is not None:
                    error = told.failure.error
                    if isinstance(error, EngineNotReadyError):
                        raise ReplicaLostError(str(error), told.replica)
                    raise error
                try:
                    told = await anext(messages)
                except StopAsyncIteration:
                    return

    async def _first(self, messages: AsyncGenerator[Told, None]) -> Told:
        try:
            return await within(anext(messages), self._patience)
        except StopAsyncIteration:
            raise ReplicaLostError("the replica has said nothing") from None
        except TimeoutError:
            raise EngineNotReadyError(f"no replica could take the request within {self._patience:g} seconds") from None

    def offer_soon(self, request_id: str, tree: OfferedTree, refused: Callable[[Exception], None]) -> None:
        """Let a text go on with a tree; ``refused`` is told, on the event loop, if it cannot be verified.

        A text that has just moved gains a token without one: it stands in for what comes of a tree that the lost replica had.
        """
        stream = self._streams.get(request_id)
        if stream is None or not stream.is_answered:
            return
        task = asyncio.get_running_loop().create_task(self._offer(stream, tree, refused))
        self._offers.add(task)
        task.add_done_callback(self._offers.discard)

    async def _offer(self, stream: Continuation, tree: OfferedTree, refused: Callable[[Exception], None]) -> None:
        attempt, length = stream.attempt, stream.length
        try:
            await self._fleet.offer(stream.replica, stream.request.request_id, tree)
        except ReplicaLostError:
            return  # the fleet ends the text's messages too, and it moves
        except Exception as error:
            if (stream.attempt, stream.length) == (attempt, length) or not isinstance(error, InvalidRequestError):
                refused(error)

    def _changed(self) -> None:
        """The fleet says something else than before."""
        if self._fleet.failure is not None and not self._models:
            self._load_error = self._fleet.failure
            self._ready.set()
            return
        states = self.replicas
        if gone := self._known_replicas - states.keys():
            self._affinity.forget(gone)
        self._known_replicas = set(states)
        targets = {state.info.target for state in states.values() if state.ready}
        if targets:
            self._lacking_since = None
            self._seen = [target for target in self._seen if target in targets]
            self._seen += sorted(targets - set(self._seen))
        elif self._lacking_since is None:
            self._lacking_since = time.monotonic()
        if self._seen and self._seen[-1] not in self._models and self._loading is None:
            self._loading = asyncio.create_task(self._load_model(self._seen[-1]))
            self._loading.add_done_callback(self._loaded)
        self._keep_models()

    async def _load_model(self, target: str) -> None:
        state = next((state for state in self.replicas.values() if state.info.target == target), None)
        if state is None:
            return
        try:
            self._models[target] = await asyncio.to_thread(self._load, state)
            keep_what_is_loaded()
        except Exception as error:  # anything else would be tried again at once, for ever
            failure = error if isinstance(error, EngineError) else EngineLoadError(f"{state.model} cannot be loaded here: {error}")
            if self._models:
                logger.error("%s", failure)  # what is served already goes on
                self._seen.remove(target)
            else:
                self._load_error = failure

    def _loaded(self, task: asyncio.Task[None]) -> None:
        self._loading = None
        if task.cancelled():
            return
        if self._models or self._load_error is not None:
            self._ready.set()
        self._changed()

    def _keep_models(self) -> None:
        """Make the target that has come last the one that new texts are for; follow what its replicas say of it."""
        for target in (target for target in self._seen if target in self._models):
            model = self._models.pop(target)
            state = next((each for each in self.replicas.values() if each.info.target == target and each.ready), None)
            if state is not None and (state.info, state.remote) != (model.info, model.remote):
                model = replace(model, info=state.info, remote=state.remote)
            self._models[target] = model
        for target in [target for target in self._models if target not in self._seen][: len(self._models) - 1]:
            del self._models[target]  # a text that is bound to it needs it no more

    def _model(self) -> ServedModel:
        if not self._models:
            raise self._load_error or EngineNotReadyError("no replica is ready yet")
        return next(reversed(self._models.values()))
