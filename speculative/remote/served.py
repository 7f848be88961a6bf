"""One text that is drafted for elsewhere, from its first tree to its last, whatever becomes of connections."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Literal

from speculative.errors import EngineNotReadyError, ProtocolError
from speculative.remote.faults import error_frame, to_protocol_error
from speculative.remote.frames import Closed, Memory, Opened, Result, Resume, Stats, Verify
from speculative.remote.grafting import Graft, graft
from speculative.remote.host import Generate, Host
from speculative.remote.line import Line
from speculative.remote.packing import pack_rows, pack_tokens, unpack_rows, unpack_tokens
from speculative.remote.transcript import Transcript, logprobs
from speculative.request import FinishReason, OfferedTree, Request, RequestOutput, RequestStats

CloseReason = Literal["finished", "cancelled", "idle", "moved", "shutdown"]


@dataclass(frozen=True, slots=True)
class _Offered:
    """The tree that the target has before it: what is left of the one of ``step``, which arrived at a monotonic time."""

    step: int
    graft: Graft
    arrived: float


class ServedSession:
    """A text, the trees that wait for it, and the connection that it is told on (``line``; None: nobody listens now).

    ``step`` is the last tree that was verified, ``received`` the last that has come. ``forget`` is called once, when the session
    has ended for good. Everything happens on one event loop.
    """

    def __init__(
        self, request: Request, seed: int, row_bytes: int, owner: str, host: Host, forget: Callable[[ServedSession], None]
    ) -> None:
        self.token = secrets.token_bytes(16)
        self.owner = owner
        self.line: Line | None = None
        self.step = self.received = 0
        self.finish_reason: FinishReason | None = None
        self.orphans_end = False
        self._request, self._seed = request, seed
        limit, max_tokens = host.engine.info.max_model_len, request.params.max_tokens
        self._max_length = limit if max_tokens is None else len(request.prompt_token_ids) + max_tokens
        self._tree_nodes = host.engine.remote.tree_nodes
        self._transcript = Transcript(request, row_bytes)
        self._host, self._forget = host, forget
        self._loop = asyncio.get_running_loop()
        self._trees: deque[tuple[Verify, float]] = deque()
        self._offered: _Offered | None = None
        self._resume: Resume | None = None
        self._is_open = self._has_begun = self._has_ended = False
        self._stats = RequestStats()
        self._batch_size = 0
        self._began = self._touched = self._gained = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        self._blocked: asyncio.Future[None] | None = None
        self._timer = self._loop.call_later(host.idle_seconds, self._look_at_clock)

    def silent_for(self, now: float) -> float:
        """Seconds for which its slot has done nothing but wait for its edge; 0 where it has something to do, or is none.

        What brings the text no further, as another connection does, ends no silence; nor does a tree of an edge that does not read
        what it is told.
        """
        waits = self._offered is None or self._blocked is not None
        return now - self._gained if self._has_begun and self.finish_reason is None and waits else 0.0

    def start(self, line: Line, generate: Generate) -> asyncio.Task[None]:
        """Begin the text; the task that does ends with it."""
        self.line = line
        self._task = asyncio.create_task(self._run(generate))
        return self._task

    def verify(self, frame: Verify) -> None:
        """Verify a tree when its turn comes; raises ProtocolError for one that cannot be."""
        self._touched = now = time.monotonic()
        if self.finish_reason is not None:
            return  # the last result has said it all, or will
        if self._resume is not None:
            raise self._refusal("out_of_order", "the session is being resumed: wait for opened", frame.step)
        if frame.step <= self.step:
            self._tell_nothing_new(frame.step, now)
            self._host.observer.verified("repeated")
            return
        if frame.step <= self.received:
            return  # it will be answered, once
        if frame.step != self.received + 1:
            raise self._refusal("out_of_order", f"step {frame.step} comes after {self.received}: leave none out", frame.step)
        transcript, most = self._transcript, self._host.limits.in_flight
        if frame.length > len(transcript.tokens):
            message = f"the text has {len(transcript.tokens)} tokens, and the tree hangs at {frame.length}"
            raise self._refusal("out_of_order", message, frame.step)
        if len(self._trees) + (self._offered is not None) >= most:
            message = f"{most} trees are in flight already: wait for a result"
            raise self._refusal("limit_exceeded", message, frame.step)
        self.received = frame.step
        if frame.length > transcript.given:
            transcript.forget_memory(frame.length - 1)
        self._trees.append((frame, now))
        self._advance()

    def resume(self, line: Line, frame: Resume) -> None:
        """Go on on another connection; raises ProtocolError, and changes nothing, where what the edge lacks is not known."""
        if missing := self._transcript.missing(frame.length, frame.text_length, frame.memory_from):
            raise ProtocolError("cannot_resume", f"{missing}: open anew", session=frame.session)
        self._touched = time.monotonic()
        if self.line is not None:
            self.line.end(Closed(self.line.number, "moved"))
        self._trees.clear()  # what waits was never seen
        self.received = self.step if self._offered is None else self._offered.step
        self.line, self._resume = line, frame
        self._unblock()
        self._host.observer.resumed()
        if self._offered is None:
            self._catch_up()

    def detach(self) -> None:
        """The connection is lost; the text goes on with what has come."""
        self.line = self._resume = None
        self._touched = time.monotonic()
        self._unblock()
        if not self._is_open or self.orphans_end:
            self.end("cancelled")  # nobody could resume it

    def cancel(self) -> None:
        """The edge needs it no more."""
        self.end("cancelled" if self.finish_reason is None else "finished")

    def end(self, reason: CloseReason) -> None:
        """Forget it all, and say so."""
        if not self._has_ended:
            self._end()
            if self.line is not None:
                self.line.end(Closed(self.line.number, reason))

    def abandon(self, error: ProtocolError) -> None:
        """The same, because of an error."""
        if not self._has_ended:
            self._end()
            if self.line is not None:
                self.line.end(error_frame(error, self.line.number))

    def _fail(self, error: Exception) -> None:
        """The same, because of what the engine says."""
        if self._has_ended:
            return
        if isinstance(error, EngineNotReadyError) and self._is_open:
            self.end("shutdown")
        else:
            told = to_protocol_error(error)
            self._host.observer.refused(told.code)
            self.abandon(told)

    def _end(self) -> None:
        self._has_ended = True
        self._timer.cancel()
        self._trees.clear()
        self._forget(self)
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    async def _run(self, generate: Generate) -> None:
        try:
            async with aclosing(generate(self._request)) as outputs:
                async for output in outputs:
                    if self._has_ended:
                        return  # what cancelled it may have been answered with this output: see `waiting.ended`
                    self._take(output)
                    while self.line is not None and not self.line.has_room:
                        await self._wait_for_room(self.line)
        except Exception as error:
            self._fail(error)

    async def _wait_for_room(self, line: Line) -> None:
        self._blocked = asyncio.ensure_future(line.room())
        try:
            await asyncio.wait([self._blocked])
        finally:
            self._unblock()

    def _unblock(self) -> None:
        if self._blocked is not None:
            self._blocked.cancel()
            self._blocked = None

    def _take(self, output: RequestOutput) -> None:
        """Keep and tell what the engine has found out, and give it what comes next."""
        self._touched = self._gained = time.monotonic()
        self._stats = output.stats
        self._batch_size = output.batch_size
        transcript = self._transcript
        first = len(transcript.tokens)
        if not self._is_open:
            self._is_open = True
            self._tell_opened()
        transcript.add(output)
        self.finish_reason = output.finish_reason
        if not output.new_token_ids and output.finish_reason is None:
            self._tell_reading(output)
            return
        self._has_begun = True
        offered, self._offered = self._offered, None
        if offered is not None:
            self.step = offered.step
            self._host.observer.verified("verified")
        if self._resume is not None:
            self._catch_up()
        else:
            self._tell_gain(output, first, offered)
        self._advance()

    def _advance(self) -> None:
        """Offer the next tree that still hangs together with the text; tell of those that do not."""
        if self.finish_reason is not None:
            self._trees.clear()
        text = self._transcript.tokens
        while self._trees and self._has_begun and self._offered is None:
            frame, arrived = self._trees.popleft()
            tokens = unpack_tokens(frame.tokens)
            parents = unpack_rows(frame.parents) if frame.parents else range(len(tokens))
            grafted = graft(tokens, parents, text[frame.length :])
            if grafted is None:
                self.step = frame.step
                self._tell_nothing_new(frame.step, arrived)
                self._host.observer.verified("left")
                continue
            self._offered = _Offered(frame.step, grafted, arrived)
            tree = OfferedTree(len(text), grafted.tokens, grafted.parents)
            if tree.is_chain and (most := max(self._tree_nodes, self._max_length - len(text) - 1)) < len(tree.tokens):
                tree = OfferedTree(len(text), tree.tokens[:most], tree.parents[:most])  # what is beyond could not be written
            self._host.engine.offer_soon(self._request.request_id, tree, self._fail)

    def _catch_up(self) -> None:
        """Tell a new connection what it lacks."""
        frame, self._resume = self._resume, None
        assert frame is not None
        self._tell_opened()
        since = self._transcript.since(frame.length, frame.text_length, frame.memory_from)
        if self._has_begun or since["text_delta"] or "prompt_logprobs" in since:
            self._tell_result(self.step, self._touched, finish_reason=self.finish_reason, **since)
        elif self.line is not None and since.get("memory"):
            self.line.tell(Memory(self.line.number, since["memory_first"], since["memory"], since["newest"]))

    def _tell_opened(self) -> None:
        if self.line is not None:
            length, cached = len(self._transcript.tokens), self._stats.cached_tokens
            self.line.tell(Opened(self.line.number, self.token, length, cached, self._seed, self.step))

    def _tell_reading(self, output: RequestOutput) -> None:
        if self.line is None:
            return
        if memory := output.memory:
            self.line.tell(Memory(self.line.number, memory.first, memory.rows, memory.newest))
        if output.prompt_logprobs or output.text_delta:
            prompt_logprobs = logprobs(output.prompt_logprobs or ())
            first = len(self._transcript.tokens)
            self._tell_result(
                0, self._began, first=first, tokens=b"", text_delta=output.text_delta, prompt_logprobs=prompt_logprobs or None
            )

    def _tell_gain(self, output: RequestOutput, first: int, offered: _Offered | None) -> None:
        if self.line is None:
            return
        told: dict[str, Any] = {}
        if (memory := output.memory) is not None:
            told |= {"memory_first": memory.first, "memory": memory.rows, "newest": memory.newest}
        if output.logprobs is not None:
            told["logprobs"] = logprobs(output.logprobs)
        if output.prompt_logprobs is not None:
            told["prompt_logprobs"] = logprobs(output.prompt_logprobs)
        if offered is not None and output.num_accepted:
            told["accepted"] = pack_rows(offered.graft.path(output.new_token_ids[: output.num_accepted]))
        self._tell_result(
            0 if offered is None else offered.step,
            self._began if offered is None else offered.arrived,
            first=first,
            tokens=pack_tokens(output.new_token_ids),
            text_delta=output.text_delta,
            finish_reason=output.finish_reason,
            **told,
        )

    def _tell_nothing_new(self, step: int, arrived: float) -> None:
        self._tell_result(step, arrived, first=len(self._transcript.tokens), tokens=b"")

    def _tell_result(self, step: int, arrived: float, **fields: Any) -> None:
        if self.line is not None:
            counted = self._stats
            stats = Stats(
                max(0.0, time.monotonic() - arrived),
                self._batch_size,
                counted.num_target_calls,
                counted.num_accepted_prediction_tokens,
                counted.num_rejected_prediction_tokens,
            )
            self.line.tell(Result(self.line.number, step, stats=stats, **fields))

    def _refusal(self, code: str, message: str, step: int) -> ProtocolError:
        assert self.line is not None
        return ProtocolError(code, f"verify: {message}", session=self.line.number, step=step)

    def _look_at_clock(self) -> None:
        """End what nobody has come for, and come back when that can be said again."""
        works = self.line is not None and self.finish_reason is None and (self._offered is not None or not self._has_begun)
        idle = self._host.idle_seconds
        left = idle if works else self._touched + idle - time.monotonic()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look_at_clock)
        else:
            self.end("idle")
