"""One text, from its request to its end: what an edge and its server do in turns, over however many connections that takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NoReturn, TypeVar

from speculative.config import MEMORY_FORMATS, MemoryFormat
from speculative.edge.config import Offline
from speculative.edge.connection import Channel, ConnectionLostError
from speculative.edge.drafting import Drafted, EdgeModel, EdgeText
from speculative.edge.link import Link
from speculative.edge.policy import EdgePolicy, Exchange
from speculative.edge.session import Gain, Rows, Session, SessionFault
from speculative.errors import (
    ContextLengthError,
    EngineStepError,
    InvalidMemoryError,
    InvalidRequestError,
    ServerUnreachableError,
)
from speculative.policy import DraftShape
from speculative.remote.frames import Closed, Error, Memory, Opened, Result
from speculative.remote.memory_codec import MemoryCodec
from speculative.request import EdgeStats, OfferedTree, Request, RequestOutput, RequestStats, Written

T = TypeVar("T")

RETRIES = 8
"""How often in a row a server may refuse a text that it might take later, or fail at it, before the text fails."""

RETRY_S, MOST_RETRY_S = 0.1, 5.0


@dataclass(slots=True)
class Tally:
    """What an edge has done so far, all its texts together."""

    num_steps: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    latest: DraftShape | None = None
    offline_tokens: int = 0
    corrected_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Workplace:
    """What all texts of an edge share. They wait ``patience`` seconds for a lost connection, and then do what ``offline`` says."""

    link: Link
    model: EdgeModel
    worker: ThreadPoolExecutor
    policy: EdgePolicy
    tally: Tally
    patience: float
    offline: Offline

    async def compute(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the one thread that computes."""
        return await asyncio.get_running_loop().run_in_executor(self.worker, work)


class _BeginAnewError(Exception):
    """The session is over at the server, and the text is not."""


@dataclass(slots=True)
class _Sent:
    """The tree that is under way."""

    at: float
    drafted: Drafted
    bytes_before: int


class Writing:
    """Writes ``request``'s text; every gain is handed to ``publish`` as it comes."""

    def __init__(self, place: Workplace, request: Request, text: EdgeText, publish: Callable[[RequestOutput], None]) -> None:
        self._place, self._request, self._text, self._publish = place, request, text, publish
        self._session = Session(request)
        self._sent: _Sent | None = None
        self._num_results = 0
        self._target_calls_before = self._target_calls = 0
        self._bytes_before = (0, 0)
        self._channel: Channel | None = None
        self._failures = 0
        # What was published, and what of it nobody has verified: the last tokens.
        self._told, self._verified = "", ""
        self._ahead: list[int] = []
        self._num_offline = self._num_corrected = 0

    async def run(self) -> None:
        """Return when the text has ended; raises EngineError where it cannot."""
        while self._session.finish_reason is None:
            connection = await self._place.link.connected(self._place.patience)
            if connection is None:
                await self._alone()
                continue
            try:
                with await connection.channel() as self._channel:
                    await self._converse(self._channel)
            except (ConnectionLostError, _BeginAnewError):
                pass
            except (SessionFault, InvalidMemoryError) as fault:
                connection.fail(str(fault))
                self._failed(f"the server contradicts itself: {fault}")
            finally:
                self._leave()

    async def _converse(self, channel: Channel) -> None:
        """The text on one connection, until it ends or that is lost."""
        session, welcome = self._session, channel.connection.welcome
        codec = self._place.model.codec(_known(welcome.format))
        if codec.bytes_per_token != welcome.model.row_bytes or codec.newest_bytes != welcome.model.newest_bytes:
            raise SessionFault(f"a row of {welcome.format} memory has {codec.bytes_per_token} bytes here")
        if session.resume_token is None:
            self._target_calls_before, self._target_calls = self._target_calls_before + self._target_calls, 0
        opening = session.begin(channel.number, welcome.model.row_bytes)
        if len(self._text.sequence.tokens) > len(session.tokens):
            self._text.rewind(session.tokens, session.memory_end)
        channel.send(opening)
        while session.finish_reason is None:
            if session.wants_tree():
                await self._draft(channel, codec)
            match await channel.receive():
                case Opened() as frame:
                    session.take_opened(frame)
                    self._begun(frame)
                case Memory() as frame:
                    session.take_memory(frame)
                    await self._remember(codec)
                case Result() as frame:
                    self._take(frame, channel)
                case Error() as frame:
                    await self._refused(frame)
                case Closed() as frame:
                    session.forget()
                    await self._again(f"the server has closed the session: {frame.reason}")

    def _begun(self, frame: Opened) -> None:
        sequence = self._text.sequence
        if sequence.scheduled_time is None:
            sequence.scheduled_time = time.monotonic()
            sequence.num_cached = min(frame.num_cached, sequence.num_prompt_tokens)

    async def _remember(self, codec: MemoryCodec) -> None:
        """Take what has come of memory while there is nothing else to do."""
        if rows := self._session.take_rows():
            await self._place.compute(lambda: self._text.remember(rows, codec))

    async def _draft(self, channel: Channel, codec: MemoryCodec) -> None:
        """Send the next tree."""
        place, limits, rows = self._place, channel.connection.limits, self._session.take_rows()
        largest = place.model.largest
        shape = place.policy.shape(replace(largest, nodes=min(largest.nodes, limits.tree_nodes)))
        drafted = await place.compute(lambda: self._drafted(rows, codec, shape, limits.chain_nodes))
        if not self._ahead:
            place.policy.drafted(drafted.depth, drafted.seconds)
        place.tally.draft_seconds += drafted.seconds
        place.tally.latest = shape
        self._sent = _Sent(time.monotonic(), drafted, channel.bytes_sent + channel.bytes_received)
        channel.send(self._session.verify(channel.number, drafted.tree))

    def _drafted(self, rows: list[Rows], codec: MemoryCodec, shape: DraftShape, chain_nodes: int) -> Drafted:
        self._text.remember(rows, codec)
        if self._ahead:
            chain = tuple(self._ahead[: min(chain_nodes, self._text.room)])
            return Drafted(OfferedTree(len(self._session.tokens), chain, tuple(range(len(chain)))), 0, 0.0)
        return self._text.draft(shape, chain_nodes)

    def _take(self, frame: Result, channel: Channel) -> None:
        """Publish what a step has brought."""
        if frame.finish_reason in ("abort", "error"):
            # The server's end, not the text's. What it says besides was said before its time.
            self._session.forget()
            self._failed(f"the server has ended the session: {frame.finish_reason}")
            raise _BeginAnewError
        gain = self._session.take_result(frame)
        if gain.tokens:
            self._failures = 0
        self._num_results += 1
        self._target_calls = gain.stats.num_target_calls
        self._measure(gain, channel)
        self._text.take(gain)
        self._verified += gain.text
        if self._ahead:
            self._compare(gain)
            return
        self._told += gain.text
        self._publish(self._output(gain, gain.tokens, gain.text))

    def _output(self, gain: Gain, tokens: tuple[int, ...], text: str, written: Written | None = None) -> RequestOutput:
        """What a gain has to tell beyond what was told."""
        logprobs = None if gain.logprobs is None else gain.logprobs[len(gain.tokens) - len(tokens) :]
        accepted = max(0, gain.num_accepted - (len(gain.tokens) - len(tokens)))
        return RequestOutput(
            self._request.request_id,
            tokens,
            text,
            gain.finish_reason,
            self.stats(),
            logprobs,
            gain.prompt_logprobs,
            accepted,
            written=written,
        )

    def _compare(self, gain: Gain) -> None:
        """Hold what the drafter wrote alone against what the server says, and publish what is not known yet."""
        same = _alike(self._ahead, gain.tokens)
        ends_early = gain.finish_reason is not None and len(gain.tokens) < len(self._ahead)
        count = min(len(self._ahead), len(gain.tokens))
        if same == count and not ends_early:
            self._ahead = self._ahead[count:]
            new = self._verified[len(self._told) :] if not self._ahead else ""
            self._told += new
            self._publish(self._output(gain, gain.tokens[count:], new))
            return
        if not self._may_revise:
            # It stays, and the server goes on from there.
            session, kept = self._session, len(self._session.tokens) - len(gain.tokens)
            session.go_on_with([*session.tokens[:kept], *self._ahead], len(self._told))
            session.finish_reason = None
            self._verified, self._ahead = self._told, []
            self._text.rewind(session.tokens, session.memory_end)
            raise _BeginAnewError
        dropped = len(self._ahead) - same
        self._num_corrected += dropped
        self._place.tally.corrected_tokens += dropped
        place = len(self._session.output) - len(gain.tokens) + same
        character = _alike(self._told, self._verified)
        self._ahead, self._told = [], self._verified
        self._publish(self._output(gain, gain.tokens[same:], self._told[character:], Written(False, place, character)))

    @property
    def _may_revise(self) -> bool:
        return self._place.offline == "correct" and self._request.revisable

    async def _alone(self) -> None:
        """Let the drafter write on until the server is back or the text has ended; raises ServerUnreachableError if it may not."""
        place, session = self._place, self._session
        unknown = self._request.params.prompt_logprobs is not None and not session.told_prompt_logprobs
        if place.offline == "stop" or not self._request.params.speculative or unknown:
            raise place.link.problem or ServerUnreachableError("cut off from the server")
        tokens = [*session.tokens, *self._ahead]
        await place.compute(lambda: self._text.rewind(tokens, min(session.memory_end, len(session.tokens))))
        while not place.link.up and session.finish_reason is None:
            output = await place.compute(self._text.write_alone)
            self._ahead += output.new_token_ids
            self._told += output.text_delta
            self._num_offline += len(output.new_token_ids)
            place.tally.offline_tokens += len(output.new_token_ids)
            session.finish_reason = output.finish_reason
            self._publish(replace(output, stats=self.stats()))

    def _measure(self, gain: Gain, channel: Channel) -> None:
        sent, self._sent = self._sent, None
        if sent is None:
            return
        waited = time.monotonic() - sent.at
        tally = self._place.tally
        tally.num_steps += 1
        tally.verify_seconds += waited
        num_bytes = channel.bytes_sent + channel.bytes_received - sent.bytes_before
        nodes, stats = len(sent.drafted.tree.tokens), gain.stats
        self._place.policy.exchanged(
            Exchange(nodes, num_bytes, len(gain.tokens), waited, stats.server_seconds, sent.drafted.seconds, stats.batch_size)
        )

    async def _refused(self, error: Error) -> None:
        """What the server says is wrong with the session or with a tree of it."""
        session = self._session
        if error.step is not None:
            session.refused(error.step)
            self._failed(f"the server refuses a tree: {error.message}")
            if session.wants_tree() and self._channel is not None:  # anything but the same again
                self._channel.send(session.verify(self._channel.number, OfferedTree(len(session.tokens))))
            return
        session.forget()
        if error.code == "context_length":
            raise ContextLengthError(error.message, param="max_tokens")
        if error.code == "invalid_parameter":
            raise InvalidRequestError(error.message)
        if error.retryable:
            await self._again(f"the server does not take the text now: {error.message}")
        if error.code in ("cannot_resume", "unknown_session", "session_in_use"):
            raise _BeginAnewError
        raise EngineStepError(f"the server refuses the text ({error.code}): {error.message}")

    async def _again(self, why: str) -> NoReturn:
        """Begin anew after a while."""
        pause = min(MOST_RETRY_S, RETRY_S * 2**self._failures)
        self._failed(why)
        await asyncio.sleep(pause)
        raise _BeginAnewError

    def _failed(self, why: str) -> None:
        self._failures += 1
        if self._failures > RETRIES:
            raise ServerUnreachableError(why)

    def _leave(self) -> None:
        """A connection is done with; what it carried counts."""
        if (channel := self._channel) is not None:
            self._bytes_before = (self._bytes_before[0] + channel.bytes_sent, self._bytes_before[1] + channel.bytes_received)
        self._channel, self._sent = None, None

    def stats(self) -> RequestStats:
        """What the text has cost and gained so far."""
        sent, received = self._bytes_before
        if self._channel is not None:
            sent, received = sent + self._channel.bytes_sent, received + self._channel.bytes_received
        sequence = self._text.sequence
        sequence.num_target_calls = self._target_calls_before + self._target_calls
        written = len(self._session.output) + len(self._ahead)
        return replace(
            sequence.stats(),
            completion_tokens=written,
            edge=EdgeStats(self._num_results, sent, received, self._num_offline, self._num_corrected),
        )


def _known(format: str) -> MemoryFormat:
    for each in MEMORY_FORMATS:
        if each == format:
            return each
    raise SessionFault(f"memory format {format!r} was not asked for")


def _alike(one: Sequence[object], other: Sequence[object]) -> int:
    """Length of the longest beginning that both have."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
