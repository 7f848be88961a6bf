"""One text, from its request to its end: what an edge and its server do in turns, over however many connections that takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from speculative.config import MEMORY_FORMATS, MemoryFormat
from speculative.edge.connection import Channel, ConnectionLostError
from speculative.edge.costs import Costs
from speculative.edge.following import follow_up
from speculative.edge.place import Workplace
from speculative.edge.published import News, Published
from speculative.edge.session import Gain, Rows, Session, SessionFault
from speculative.edge.text import Drafted, EdgeText
from speculative.errors import (
    ContextLengthError,
    EngineStepError,
    InvalidMemoryError,
    InvalidRequestError,
    ServerTimeoutError,
    ServerUnreachableError,
)
from speculative.policy import DraftShape
from speculative.remote.frames import Closed, Error, Memory, Opened, Result
from speculative.remote.memory_codec import MemoryCodec
from speculative.request import OfferedTree, Request, RequestOutput, RequestStats

RETRIES = 8
"""How often in a row a server may refuse a text that it might take later, or fail at it, before the text fails."""

RETRY_S, MOST_RETRY_S = 0.1, 5.0


class _BeginAnewError(Exception):
    """The session is over at the server, and the text is not."""


class Writing:
    """Writes ``request``'s text; every gain is handed to ``publish`` as it comes."""

    def __init__(self, place: Workplace, request: Request, text: EdgeText, publish: Callable[[RequestOutput], None]) -> None:
        self._place, self._request, self._text, self._publish = place, request, text, publish
        self._session = Session(request)
        self._published = Published()
        self._costs = Costs(place.policy, place.tally)
        self._looked_ahead = (0, 0)
        self._failures = 0

    async def run(self) -> None:
        """Return when the text has ended; raises EngineError where it cannot."""
        while self._session.finish_reason is None:
            connection = await self._place.link.connected(self._place.patience)
            if connection is None:
                await self._alone()
                continue
            try:
                with await connection.channel() as channel:
                    self._costs.enter(channel)
                    await self._converse(channel)
            except (ConnectionLostError, _BeginAnewError):
                pass
            except (SessionFault, InvalidMemoryError) as fault:
                connection.fail(str(fault))
                self._failed(f"the server contradicts itself: {fault}")
            finally:
                self._costs.leave()

    async def _converse(self, channel: Channel) -> None:
        """The text on one connection, until it ends or that is lost."""
        session, welcome = self._session, channel.connection.welcome
        codec = self._place.model.codec(_known(welcome.format))
        if codec.bytes_per_token != welcome.model.row_bytes or codec.newest_bytes != welcome.model.newest_bytes:
            raise SessionFault(f"a row of {welcome.format} memory has {codec.bytes_per_token} bytes here")
        if session.resume_token is None:
            self._costs.open_anew()
        opening = session.begin(channel.number, welcome.model.row_bytes)
        if len(self._text.sequence.tokens) > len(session.tokens):
            self._text.rewind(session.tokens, session.memory_end)
        channel.send(opening)
        while session.finish_reason is None:
            if session.can_draft(welcome.limits.in_flight):
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
                    await self._refused(frame, channel)
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
            await self._place.worker.compute(lambda: self._text.remember(rows, codec))

    async def _draft(self, channel: Channel, codec: MemoryCodec) -> None:
        """Send the next tree, and, while that is under way, what may follow it."""
        place, session, limits = self._place, self._session, channel.connection.limits
        largest = place.model.largest
        under_way = session.under_way()
        if not under_way:
            shape = place.policy.shape(replace(largest, nodes=min(largest.nodes, limits.tree_nodes)))
            drafted = await self._drafted(codec, shape, limits.chain_nodes)
            place.tally.latest = shape
            self._send(channel, drafted.tree, ahead=False)
            under_way = [drafted.tree]
        ahead = place.policy.ahead(largest)
        if ahead is None or len(under_way) != 1 or not self._may_look_ahead(channel):
            return
        self._looked_ahead = (session.step, len(session.tokens))
        drafted = await self._drafted(codec, ahead, limits.chain_nodes)
        following = follow_up(under_way[0], drafted.tree, limits.tree_nodes)
        if following is not None and not channel.has_news:
            self._send(channel, following, ahead=True)

    def _may_look_ahead(self, channel: Channel) -> bool:
        """Whether the tree that is under way is to be followed for the first time, and there is nothing better to do."""
        session, idle = self._session, self._place.worker.is_idle and not channel.has_news
        news = self._looked_ahead != (session.step, len(session.tokens)) and not self._published.ahead
        room = session.can_draft(channel.connection.limits.in_flight)
        return idle and news and room and self._request.params.speculative

    async def _drafted(self, codec: MemoryCodec, shape: DraftShape, chain_nodes: int) -> Drafted:
        """A tree behind the text; or what was written alone, as a chain."""
        place, rows = self._place, self._session.take_rows()
        drafted = await place.worker.compute(lambda: self._draft_now(rows, codec, shape, chain_nodes))
        place.policy.drafted(drafted.depth, drafted.seconds)
        place.tally.draft_seconds += drafted.seconds
        return drafted

    def _draft_now(self, rows: list[Rows], codec: MemoryCodec, shape: DraftShape, chain_nodes: int) -> Drafted:
        self._text.remember(rows, codec)
        if ahead := self._published.ahead:
            chain = tuple(ahead[: min(chain_nodes, self._text.room)])
            return Drafted(OfferedTree(len(self._session.tokens), chain, tuple(range(len(chain)))), 0, 0.0)
        return self._text.draft(shape, chain_nodes)

    def _send(self, channel: Channel, tree: OfferedTree, *, ahead: bool) -> None:
        carried = channel.bytes_sent
        channel.send(self._session.verify(channel.number, tree))
        self._costs.sent(self._session.step, channel, channel.bytes_sent - carried, ahead=ahead)

    def _take(self, frame: Result, channel: Channel) -> None:
        """Publish what a step has brought."""
        if frame.finish_reason in ("abort", "error"):
            # The server's end, not the text's. What it says besides was said before its time.
            self._session.forget()
            self._failed(f"the server has ended the session: {frame.finish_reason}")
            raise _BeginAnewError
        session, published = self._session, self._published
        gain = session.take_result(frame)
        if gain.tokens:
            self._failures = 0
        self._costs.gained(frame.step, gain, channel, drafts=not published.ahead)
        if not (gain.tokens or gain.text or gain.finish_reason):
            return  # it answers a tree that the text has left, or is a part of what is told as a whole
        self._text.take(gain)
        corrected = published.num_corrected
        news = published.take(gain, len(session.output), revise=self._place.offline == "correct" and self._request.revisable)
        self._place.tally.corrected_tokens += published.num_corrected - corrected
        if news is None:
            self._keep(gain)
        else:
            self._publish(self._output(gain, news))

    def _keep(self, gain: Gain) -> NoReturn:
        """What the drafter wrote alone stays, and the server goes on from there."""
        session, told = self._session, len(self._published.told)
        session.go_on_with([*session.tokens[: len(session.tokens) - len(gain.tokens)], *self._published.keep()], told)
        session.finish_reason = None
        self._text.rewind(session.tokens, session.memory_end)
        raise _BeginAnewError

    def _output(self, gain: Gain, news: News) -> RequestOutput:
        """What a gain has to tell beyond what was told."""
        known = len(gain.tokens) - len(news.tokens)
        return RequestOutput(
            self._request.request_id,
            news.tokens,
            news.text,
            gain.finish_reason,
            self.stats(),
            None if gain.logprobs is None else gain.logprobs[known:],
            gain.prompt_logprobs,
            max(0, gain.num_accepted - known),
            written=news.written,
        )

    async def _alone(self) -> None:
        """Let the drafter write on until the server is back or the text has ended; raises ServerUnreachableError if it may not."""
        place, session = self._place, self._session
        unknown = self._request.params.prompt_logprobs is not None and not session.told_prompt_logprobs
        if place.offline == "stop" or not self._request.params.speculative or unknown:
            raise place.link.problem or ServerUnreachableError("cut off from the server")
        tokens = [*session.tokens, *self._published.ahead]
        await place.worker.compute(lambda: self._text.rewind(tokens, min(session.memory_end, len(session.tokens))))
        while not place.link.up and session.finish_reason is None:
            output = await place.worker.compute(self._text.write_alone)
            self._published.write_alone(output)
            place.tally.offline_tokens += len(output.new_token_ids)
            session.finish_reason = output.finish_reason
            self._publish(replace(output, stats=self.stats()))

    async def _refused(self, error: Error, channel: Channel) -> None:
        """What the server says is wrong with the session or with a tree of it."""
        session = self._session
        if error.step is not None:
            if session.refused(error.step):
                self._failed(f"the server refuses a tree: {error.message}")
                if not session.under_way():  # anything but the same again
                    self._send(channel, OfferedTree(len(session.tokens)), ahead=False)
            return
        session.forget()
        if error.code == "context_length":
            raise ContextLengthError(error.message, param="max_tokens")
        if error.code == "invalid_parameter":
            raise InvalidRequestError(error.message)
        if error.code == "limit_exceeded":  # of what a session may have, time alone is not told in `welcome`
            raise ServerTimeoutError(error.message)
        if error.code == "wrong_model":
            channel.connection.fail(error.message)  # whoever greets it anew is told the same
            raise ServerUnreachableError(f"{self._place.link.server}: {error.message}", permanent=True)
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

    def stats(self) -> RequestStats:
        """What the text has cost and gained so far."""
        sequence, published = self._text.sequence, self._published
        sequence.num_target_calls = self._costs.num_target_calls
        written = len(self._session.output) + len(published.ahead)
        return replace(sequence.stats(), completion_tokens=written, edge=self._costs.edge_stats(published))


def _known(format: str) -> MemoryFormat:
    for each in MEMORY_FORMATS:
        if each == format:
            return each
    raise SessionFault(f"memory format {format!r} was not asked for")
