"""asyncio on one side, the one engine thread on the other."""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final, NoReturn, TypeVar

from transformers import PreTrainedTokenizerBase

from speculative.block_transfer import read_blocks, write_blocks
from speculative.config import EngineConfig, EngineStatus, ModelInfo, RemoteInfo
from speculative.engine import Engine
from speculative.errors import (
    SHUTTING_DOWN,
    EngineError,
    EngineLoadError,
    EngineLostError,
    EngineNotReadyError,
    EngineStepError,
    InvalidRequestError,
)
from speculative.garbage import keep_what_is_loaded
from speculative.request import FinishReason, Grammar, OfferedTree, Request, RequestOutput, RequestStats
from speculative.waiting import set_within

T = TypeVar("T")

TURN_S: Final = 1e-4
"""Seconds for which a thread may keep the interpreter from another. Python's own 5 ms are half of a step: the event loop sends the
tokens of a step just when the engine is about to begin the next, which would wait until all are sent. What a switch costs is some
ten microseconds, and only where both have something to do."""

logger = logging.getLogger("moaserve.engine")

_Command = Callable[[Engine], object] | None
"""What the engine thread is to do between two steps; None: to end."""


class AsyncEngine:
    """Runs an Engine in a thread of its own and hands its outputs to coroutines of one event loop."""

    def __init__(self, load: Callable[[], Engine]) -> None:
        self._load = load
        self._engine: Engine | None = None
        self._load_error: EngineError | None = None
        self._loaded = threading.Event()
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._streams: dict[str, asyncio.Queue[RequestOutput]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ready = asyncio.Event()
        self._lost = asyncio.Event()
        self._busy_since: float | None = None
        self._dead = False
        self._held: list[RequestOutput] = []
        self._asked: set[asyncio.Future[Any]] = set()
        self._ended = False

    @classmethod
    def from_config(cls, config: EngineConfig) -> AsyncEngine:
        """An engine that loads what ``config`` names once it is started."""
        from speculative.loading import load_engine

        return cls(lambda: load_engine(config))

    async def start(self) -> None:
        """Start the engine thread; it loads the model and then serves. Returns at once."""
        self._loop = asyncio.get_running_loop()
        sys.setswitchinterval(TURN_S)
        self._thread = threading.Thread(target=self._run, name="moaserve-engine", daemon=True)
        self._thread.start()

    async def wait_ready(self) -> None:
        """Return once the model is loaded; raises EngineLoadError when it cannot be."""
        await self._ready.wait()
        if self._load_error is not None:
            raise self._load_error

    async def wait_lost(self) -> NoReturn:
        """Raise EngineLostError once nothing can be computed any more, should a process that shares the model end."""
        await self._lost.wait()
        assert self._engine is not None
        raise EngineLostError(self._engine.lost)

    async def stop(self, timeout: float = 10.0) -> None:
        """Abort everything and end the thread; open streams end with "abort".

        A load that is under way, or a step that does not end within ``timeout`` seconds, is left to itself: the thread is a daemon
        and ends with the process.
        """
        self._draining = True
        self._commands.put(None)
        if self._thread is not None and self._ready.is_set():
            await asyncio.to_thread(self._thread.join, timeout)
        self._end_streams("abort")

    async def drain(self, timeout: float) -> bool:
        """Take no new requests and wait up to ``timeout`` seconds for the running ones; True if all have ended.

        Those that have not are aborted.
        """
        self._draining = True
        ended = await set_within(self._idle, timeout)
        for request_id in list(self._streams):
            self.abort(request_id)
        return ended

    @property
    def ready(self) -> bool:
        """True when requests are taken."""
        return self._engine is not None and not self._draining and self.alive

    @property
    def alive(self) -> bool:
        """True while the thread runs, loading has not failed, and no process that shares the model is lost."""
        return self._thread is not None and self._thread.is_alive() and self._load_error is None and not self._failed

    @property
    def _failed(self) -> bool:
        return self._dead or (self._engine is not None and self._engine.lost is not None)

    @property
    def busy_seconds(self) -> float:
        """How long the thread has been at its present step; 0 while it loads, or has nothing to do."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def info(self) -> ModelInfo:
        """The loaded model; EngineNotReadyError until then."""
        return self._loaded_engine().info

    @property
    def remote(self) -> RemoteInfo:
        """What those who draft elsewhere are told; EngineNotReadyError until the model is loaded."""
        return self._loaded_engine().remote

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The loaded model's tokenizer; EngineNotReadyError until then, InvalidRequestError where it has none."""
        tokenizer = self._loaded_engine().tokenizer
        if tokenizer is None:
            raise InvalidRequestError("this model has no tokenizer: put its tokenizer.json beside its weights")
        return tokenizer

    def status(self) -> EngineStatus:
        """A snapshot of the engine's load."""
        return self._engine.status() if self._engine is not None else EngineStatus(0, 0, 0.0)

    def validate(self, request: Request) -> None:
        """Raise what ``generate`` would, before anything is started."""
        if self._draining:
            raise EngineNotReadyError(SHUTTING_DOWN)
        if self._failed:
            raise EngineNotReadyError("the engine is not running")
        self._loaded_engine().validate(request)

    def check_grammar(self, grammar: Grammar) -> None:
        """As in Engine: what takes long about ``validate`` for a request with this grammar, off the event loop."""
        self._loaded_engine().check_grammar(grammar)

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request until it ends; closing the generator early aborts the request."""
        self.validate(request)
        if request.request_id in self._streams:
            raise EngineError(f"request id {request.request_id!r} is already in use")
        stream: asyncio.Queue[RequestOutput] = asyncio.Queue()
        self._streams[request.request_id] = stream
        self._idle.clear()
        self._commands.put(lambda engine: self._add(engine, request))
        finished = False
        try:
            while not finished:
                output = await stream.get()
                finished = output.finish_reason is not None
                if output.finish_reason == "error":
                    raise EngineStepError("the engine failed while working on this request")
                yield output
        finally:
            self._streams.pop(request.request_id, None)
            if not self._streams:
                self._idle.set()
            if not finished:
                self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        """End a request within one step; its stream, if still open, gets a last output with "abort"."""
        self._commands.put(lambda engine: self._abort(engine, request_id))

    async def offer(self, request_id: str, tree: OfferedTree) -> None:
        """Let a remote request go on with a tree; raises InvalidRequestError for one that cannot be verified.

        What is gained comes with the outputs of ``generate``.
        """
        await self._ask(lambda engine: engine.offer(request_id, tree))

    def offer_soon(self, request_id: str, tree: OfferedTree, refused: Callable[[Exception], None]) -> None:
        """As ``offer``, for who does not wait: ``refused`` is told, on the event loop, if the tree cannot be verified."""

        def offer(engine: Engine) -> None:
            try:
                engine.offer(request_id, tree)
            except Exception as error:
                self._call(refused, error)

        self._commands.put(offer)

    def known_blocks(self, keys: Sequence[bytes]) -> int:
        """How many of a text's leading blocks, by their keys (see ``prefix_cache``), need not be computed."""
        return self._loaded_engine().prefixes.index.known(keys)

    async def read_blocks(self, keys: Sequence[bytes], first: int) -> list[bytes]:
        """The leading blocks that are kept, from the one numbered ``first`` on, for ``write_blocks`` of an engine like this one.

        They are copied a portion at a time: running texts go on in between.
        """
        return await read_blocks(self._loaded_engine().prefixes.format, self._ask, keys, first)

    async def write_blocks(self, keys: Sequence[bytes], blocks: Sequence[bytes]) -> None:
        """Keep what another engine has computed: the contents of the last of a text's ``keys``; the others are known already.

        They are copied a portion at a time, and requests that begin after this find them. Raises InvalidBlockError.
        """
        await write_blocks(self._loaded_engine().prefixes.format, self._ask, keys, blocks)

    async def _ask(self, work: Callable[[Engine], T]) -> T:
        """What the engine's thread brings between two steps; what it raises is raised here."""
        if self._ended or not self.alive:
            raise EngineNotReadyError("the engine is not running")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._asked.add(answer)
        answer.add_done_callback(self._asked.discard)

        def ask(engine: Engine) -> None:
            try:
                result = work(engine)
            except Exception as error:
                self._call(_fail, answer, error)
            else:
                self._call(_answer, answer, result)

        self._commands.put(ask)
        return await answer

    def _loaded_engine(self) -> Engine:
        if self._engine is None:
            raise self._load_error or EngineNotReadyError("the model is still loading")
        return self._engine

    def _run(self) -> None:
        """The engine thread."""
        try:
            self._engine = self._load()
        except EngineError as error:
            self._load_error = error
        except Exception as error:
            logger.exception("loading failed")
            self._load_error = EngineLoadError(f"loading failed: {error}")
        keep_what_is_loaded()
        self._call(self._ready.set)
        if self._engine is None:
            return
        self._engine.before_pass = self._tell
        self._engine.when_lost(self._lose)
        try:
            while self._take_commands(self._engine):
                outputs = self._step(self._engine)
                self._tell()
                self._held = outputs
                if not self._may_wait(self._engine):
                    self._tell()
        except BaseException as error:  # libraries in Rust panic with what is no Exception
            # Nobody is left to answer: the streams end, and `alive` turns false for the health check.
            if not isinstance(error, EngineLostError):  # which the log has already
                logger.exception("the engine thread has ended")
            self._dead = True
            self._tell()
            self._call(self._end_streams, "error")
        finally:
            self._engine.close()
            self._call(self._leave_unanswered)

    def _lose(self) -> None:
        """In any thread: let the engine's thread end, and tell who waits for that, even if it is held up."""
        self._commands.put(_end_lost)
        self._call(self._lost.set)

    def _take_commands(self, engine: Engine) -> bool:
        """Carry out what has been asked, waiting when there is nothing else to do; False to end."""
        while True:
            self._busy_since = time.monotonic() if engine.has_work else None
            try:
                command = self._commands.get(block=not engine.has_work)
            except queue.Empty:
                return True
            self._tell()
            if command is None:
                return False
            command(engine)

    def _add(self, engine: Engine, request: Request) -> None:
        try:
            engine.add(request)
        except BaseException:
            logger.exception("a request could not be added")
            self._call(self._publish, [RequestOutput(request.request_id, (), "", "error", RequestStats())])

    def _abort(self, engine: Engine, request_id: str) -> None:
        try:
            output = engine.abort(request_id)
        except BaseException:
            logger.exception("a request could not be aborted")
            output = RequestOutput(request_id, (), "", "error", RequestStats())
        if output is not None:
            self._call(self._publish, [output])

    def _step(self, engine: Engine) -> list[RequestOutput]:
        try:
            return engine.step()
        except EngineLostError:
            raise
        except BaseException:
            # The step's requests are lost, the engine is not: their slots are freed and the next step starts clean.
            logger.exception("an engine step failed")
            return engine.fail_active()

    def _may_wait(self, engine: Engine) -> bool:
        """Whether what a step gained is told when the next one's pass begins.

        Sending it takes the interpreter, which a pass does without, and drafting does not. First and last tokens do not wait, nor
        does what somebody elsewhere needs to draft.
        """
        more = all(output.finish_reason is None and output.memory is None for output in self._held)
        return more and engine.has_work and engine.clock.of_step["verify"] > 0

    def _tell(self) -> None:
        if self._held:
            self._call(self._publish, self._held)
            self._held = []

    def _publish(self, outputs: list[RequestOutput]) -> None:
        """On the event loop: hand outputs to their streams; those nobody reads any more are dropped."""
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.put_nowait(output)

    def _end_streams(self, reason: FinishReason) -> None:
        for request_id, stream in self._streams.items():
            stream.put_nowait(RequestOutput(request_id, (), "", reason, RequestStats()))

    def _leave_unanswered(self) -> None:
        """On the event loop, behind all answers: the thread is at its end."""
        self._ended = True
        for answer in list(self._asked):
            _fail(answer, EngineNotReadyError("the engine has stopped"))

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def _end_lost(engine: Engine) -> None:
    raise EngineLostError(engine.lost)


def _answer(future: asyncio.Future[T], result: T) -> None:
    if not future.done():  # who asked may have gone
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
