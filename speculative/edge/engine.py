"""EdgeEngine: what HTTP asks of an engine, on a machine without the target."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import NoReturn

from transformers import PreTrainedTokenizerBase

from speculative.config import MEMORY_FORMATS, EdgeStatus, EngineStatus, ModelInfo
from speculative.edge.config import EdgeConfig
from speculative.edge.drafting import EdgeModel
from speculative.edge.link import Link
from speculative.edge.place import Tally, Worker, Workplace
from speculative.edge.policy import EdgePolicy
from speculative.edge.writing import Writing
from speculative.errors import (
    SHUTTING_DOWN,
    EngineError,
    EngineLoadError,
    EngineNotReadyError,
    EngineStepError,
    InvalidRequestError,
)
from speculative.garbage import keep_what_is_loaded
from speculative.remote.frames import Hello
from speculative.remote.protocol import VERSION
from speculative.request import Grammar, Request, RequestOutput
from speculative.validation import check_request
from speculative.waiting import for_ever, set_within

logger = logging.getLogger("moaserve.edge")

FRAME_BYTES = 2**16
"""Largest frame that is asked for: pongs wait behind frames, and a slow line must not look like a lost one."""


class EdgeEngine:
    """Serves texts that a server verifies; as `async_engine.AsyncEngine` seen from HTTP. ``load`` reads what drafts."""

    def __init__(self, config: EdgeConfig, load: Callable[[EdgeConfig], EdgeModel] = EdgeModel.load) -> None:
        self._config, self._load_model = config, load
        self._model: EdgeModel | None = None
        self._load_error: EngineError | None = None
        self._place: Workplace | None = None
        self._worker = Worker()
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._turns = _Turns(config.max_num_seqs)
        self._tasks: dict[asyncio.Task[None], asyncio.Queue[RequestOutput | Exception]] = {}
        self._loading: asyncio.Task[None] | None = None
        self._draining = self._stopped = False

    async def start(self) -> None:
        """Begin to load the bundle, then to connect. Returns at once."""
        self._loading = asyncio.create_task(self._load())

    async def wait_ready(self) -> None:
        """Return once the bundle is loaded and the server reached, or known to be out of reach; raises EngineError."""
        await self._ready.wait()
        if self._load_error is not None:
            raise self._load_error

    async def wait_lost(self) -> NoReturn:
        """As in AsyncEngine; an edge shares its drafter with no other process, so nothing is lost."""
        await for_ever()

    async def stop(self) -> None:
        """End all texts and hang up; a load that is under way is left to itself."""
        self._draining = self._stopped = True
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        await self._end_texts()
        if self._place is not None:
            await self._place.link.close()
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def drain(self, timeout: float) -> bool:
        """As in AsyncEngine."""
        self._draining = True
        ended = await set_within(self._idle, timeout)
        await self._end_texts()
        return ended

    async def _end_texts(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def ready(self) -> bool:
        """True when requests are taken."""
        return self._place is not None and not self._draining and self.alive

    @property
    def alive(self) -> bool:
        """True until it is stopped, or loading fails; and while a load that was left to itself goes on."""
        loads = self._model is None and self._worker.busy_since is not None
        return self._loading is not None and self._load_error is None and (loads or not self._stopped)

    @property
    def busy_seconds(self) -> float:
        """How long the thread that computes has been at its present work; 0 while it loads, or has nothing to do."""
        since = self._worker.busy_since
        return 0.0 if since is None or self._place is None else time.monotonic() - since

    @property
    def info(self) -> ModelInfo:
        """The bundle's model, as much of it as the server takes; EngineNotReadyError until it is loaded."""
        place = self._loaded()
        connection, info = place.link.connection, place.model.info
        if connection is None:
            return info
        return replace(info, max_model_len=min(info.max_model_len, connection.welcome.model.max_model_len))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The bundle's tokenizer; EngineNotReadyError until it is loaded."""
        tokenizer = self._loaded().model.tokenizer
        if tokenizer is None:
            raise InvalidRequestError("this bundle has no tokenizer: export one of a model that has one")
        return tokenizer

    def status(self) -> EngineStatus:
        """How busy it is."""
        if self._place is None:
            return EngineStatus(0, 0, 0.0)
        tally, link = self._place.tally, self._place.link
        return EngineStatus(
            self._turns.taken,
            self._turns.waiting,
            self._turns.taken / self._config.max_num_seqs,
            draft_depth=tally.latest.depth if tally.latest else 0,
            draft_nodes=tally.latest.nodes if tally.latest else 0,
            num_steps=tally.num_steps,
            phase_seconds={"draft": tally.draft_seconds, "verify": tally.verify_seconds},
            edge=EdgeStatus(
                server_up=link.up,
                refuses=self._refuses(link),
                round_trip=link.connection.round_trip.smoothed if link.connection is not None else None,
                num_reconnects=max(0, link.num_connections - 1),
                bytes_sent=link.bytes_sent,
                bytes_received=link.bytes_received,
                offline_tokens=tally.offline_tokens,
                corrected_tokens=tally.corrected_tokens,
            ),
        )

    def _refuses(self, link: Link) -> bool:
        permanent = link.problem is not None and link.problem.permanent
        return not link.up and (permanent or (self._config.offline == "stop" and link.is_away(self._config.reconnect_timeout)))

    def validate(self, request: Request) -> None:
        """Raise what ``generate`` would, before anything is started."""
        if self._draining:
            raise EngineNotReadyError(SHUTTING_DOWN)
        place = self._loaded()
        if request.params.grammar is not None:
            self.check_grammar(request.params.grammar)
        check_request(request, self.info)
        if not place.link.up and place.link.problem is not None and place.link.problem.permanent:
            raise place.link.problem

    def check_grammar(self, grammar: Grammar) -> None:
        """As `Texts.check_grammar`."""
        self._loaded().model.texts.check_grammar(grammar)

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request until it ends; closing the generator early ends its session at the server."""
        self.validate(request)
        outputs: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        task = asyncio.create_task(self._write(request, outputs))
        self._tasks[task] = outputs
        self._idle.clear()
        task.add_done_callback(self._ended)
        try:
            while True:
                output = await outputs.get()
                if isinstance(output, Exception):
                    raise output
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            task.cancel()

    async def _write(self, request: Request, outputs: asyncio.Queue[RequestOutput | Exception]) -> None:
        place, arrival = self._loaded(), time.monotonic()
        try:
            async with self._turns.turn(request.priority):
                params = request.params
                if params.seed is None:
                    # The drafter adds the noise that the target is sampled with.
                    request = replace(request, params=replace(params, seed=secrets.randbits(63)))
                length = self.info.max_model_len
                text = await place.worker.compute(lambda: place.model.begin(request, length), undo=place.model.end)
                text.sequence.arrival_time = arrival
                try:
                    await Writing(place, request, text, outputs.put_nowait).run()
                finally:
                    self._worker.soon(lambda: place.model.end(text))  # behind what this text still has to compute
        except asyncio.CancelledError:
            outputs.put_nowait(EngineNotReadyError(SHUTTING_DOWN))
            raise
        except EngineError as error:
            if isinstance(error, EngineStepError):  # what callers are not told
                logger.error("a text has failed: %s", error)
            outputs.put_nowait(error)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # libraries in Rust panic with what is no Exception
            logger.exception("a text has failed")
            outputs.put_nowait(error if isinstance(error, Exception) else EngineStepError("This text could not be written."))

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not self._tasks:
            self._idle.set()

    async def _load(self) -> None:
        config, loop = self._config, asyncio.get_running_loop()
        try:
            self._model = model = await loop.run_in_executor(self._worker, lambda: self._load_model(config))
            keep_what_is_loaded()
            formats = (config.memory_format, *(each for each in MEMORY_FORMATS if each != config.memory_format))
            link = Link(config.server, Hello((VERSION,), model.info.pair, formats, frame_bytes=FRAME_BYTES))
            link.start()
            try:
                await link.tried()
                if config.offline == "stop" and link.problem is not None and link.problem.starting:
                    logger.info("waiting for it: with --offline stop nothing is answered without a server")
                    await link.known()
            except asyncio.CancelledError:  # it was told to stop
                await link.close()
                raise
            if (problem := link.problem) is not None and (problem.permanent or config.offline == "stop"):
                await link.close()
                raise problem
            self._place = Workplace(link, model, self._worker, EdgePolicy(), Tally(), config.reconnect_timeout, config.offline)
        except EngineError as error:
            self._load_error = error
        except Exception as error:
            logger.exception("loading failed")
            self._load_error = EngineLoadError(f"loading failed: {error}")
        self._ready.set()

    def _loaded(self) -> Workplace:
        if self._place is None:
            raise self._load_error or EngineNotReadyError("the bundle is still loading")
        return self._place


class _Turns:
    """Lets ``count`` texts be written at a time; of others the lowest priority goes first, and of these the one that came first."""

    def __init__(self, count: int) -> None:
        self._free, self._count = count, count
        self._order = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    @property
    def taken(self) -> int:
        """How many are being written."""
        return self._count - self._free

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(not future.done() for _, _, future in self._waiting)

    @asynccontextmanager
    async def turn(self, priority: int) -> AsyncIterator[None]:
        """One text's turn."""
        if self._free:
            self._free -= 1
        else:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (priority, next(self._order), mine))
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():  # it has just been given one
                    self._give_back()
                raise
        try:
            yield
        finally:
            self._give_back()

    def _give_back(self) -> None:
        """The turn goes to whoever waits for it."""
        while self._waiting:
            _, _, future = heapq.heappop(self._waiting)
            if not future.done():
                return future.set_result(None)
        self._free += 1
