"""Edges over queues instead of a network: they draft at random, and believe a server nothing."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from itertools import pairwise
from typing import Any, TypeVar

from speculative.async_engine import AsyncEngine
from speculative.errors import EngineNotReadyError
from speculative.remote import frames as f
from speculative.remote.host import Generate, Host
from speculative.remote.limits import Limits
from speculative.remote.packing import pack_rows, pack_tokens, unpack_rows, unpack_tokens
from speculative.remote.protocol import decode_server, encode
from speculative.remote.registry import SessionRegistry
from speculative.remote.verifier import Verifier
from speculative.request import Request, RequestOutput
from tests.speculative.test_remote_trees import offered

T = TypeVar("T", bound=Any)

PATIENCE = 30.0


class Counting:
    """An observer."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def connected(self, change: int) -> None:
        self.counts["connections"] += change

    def session(self, change: int) -> None:
        self.counts["sessions"] += change

    def resumed(self) -> None:
        self.counts["resumed"] += 1

    def verified(self, outcome: str) -> None:
        self.counts[outcome] += 1

    def carried(self, direction: str, size: int) -> None:
        self.counts[direction] += size

    def refused(self, code: str) -> None:
        self.counts[code] += 1


class Server:
    """Sessions over a real engine; ``limits`` and ``idle_seconds`` as a server has them."""

    def __init__(self, engine: AsyncEngine, limits: Limits | None = None, idle_seconds: float = PATIENCE) -> None:
        self.engine, self.observer = engine, Counting()
        host = Host(engine, self.observer, lambda: "tiny", limits or Limits(sessions=16), idle_seconds)
        self.registry = SessionRegistry(host)

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        async with aclosing(self.engine.generate(request)) as outputs:
            async for output in outputs:
                if output.finish_reason == "abort":
                    raise EngineNotReadyError("the server is shutting down")
                yield output

    def connect(self, owner: str = "", generate: Generate | None = None) -> Connection:
        return Connection(Verifier(self.registry, generate or self.generate, owner))

    async def greeted(self, owner: str = "", **hello: int) -> Connection:
        connection = self.connect(owner)
        connection.tell(f.Hello((1,), self.engine.info.pair, ("int8",), **hello))
        connection.welcome = welcome = await connection.hear(f.Welcome)
        connection.limits = Limits.of(welcome, hello.get("frame_bytes", 2**20))
        return connection

    async def assert_nothing_is_left(self) -> None:
        """No session, no task, no slot."""
        await asyncio.wait_for(self.engine._idle.wait(), PATIENCE)
        while self.engine.status().num_running or self.engine.status().num_waiting:
            await asyncio.sleep(0.001)
        assert len(self.registry) == 0
        assert self.observer.counts["sessions"] == 0
        while self.registry._tasks:
            await asyncio.sleep(0)


class Connection:
    """Both ends of a connection to a server."""

    def __init__(self, verifier: Verifier) -> None:
        self.limits = Limits()
        self.welcome: f.Welcome | None = None
        self.reads = asyncio.Event()
        self.reads.set()
        self.largest = self.sent = 0
        self._to_server: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._to_edge: asyncio.Queue[bytes] = asyncio.Queue()
        self._is_cut = False
        self.ended = asyncio.create_task(verifier.run(self._to_server.get, self._send))

    async def _send(self, data: bytes) -> None:
        await self.reads.wait()
        if self._is_cut:
            raise ConnectionError("cut")
        self.largest = max(self.largest, len(data))
        self.sent += len(data)
        self._to_edge.put_nowait(data)

    def tell(self, *frames: f.ClientFrame) -> None:
        for frame in frames:
            self._to_server.put_nowait(encode(frame))

    def tell_bytes(self, data: bytes) -> None:
        self._to_server.put_nowait(data)

    def heard(self) -> list[f.ServerFrame]:
        """What has come so far."""
        return [decode_server(self._to_edge.get_nowait(), self.limits) for _ in range(self._to_edge.qsize())]

    async def hear(self, kind: type[T] | None = None) -> T:
        """The next frame, which has to be of that kind."""
        frame = decode_server(await asyncio.wait_for(self._to_edge.get(), PATIENCE), self.limits)
        assert kind is None or isinstance(frame, kind), frame
        return frame

    async def hear_last(self, kind: type[T]) -> T:
        """The next frame of that kind; others are passed over."""
        while not isinstance(frame := await self.hear(), kind):
            pass
        return frame

    async def cut(self) -> None:
        """Lose the connection, and what is on its way to the edge."""
        self._is_cut = True
        self.reads.set()
        self._to_server.put_nowait(None)
        await self.ended

    async def close(self) -> None:
        self._to_server.put_nowait(None)
        await asyncio.wait_for(self.ended, PATIENCE)


class Text:
    """One text at an edge, which knows what is to come and drafts that among other things."""

    def __init__(self, request: Request, expected: list[int], chance: random.Random, most_in_flight: int = 1) -> None:
        self.request, self.expected, self.chance = request, expected, chance
        self.most_in_flight = most_in_flight
        self.tokens = list(request.given_token_ids)
        self.text = ""
        self.logprobs: list[f.Logprob] = []
        self.prompt_logprobs: list[f.Logprob] = []
        self.finish_reason: str | None = None
        self.token = b""
        self.is_open = False
        self.step = 0
        self.answered = -1
        self.trees: deque[f.Verify] = deque()
        self.memory_end: int | None = None
        self.number = 0
        self.num_accepted = 0
        self.last: f.Result | None = None

    def open(self, number: int) -> f.Open:
        self.number = number
        request = self.request
        return f.Open(
            number,
            pack_tokens(request.prompt_token_ids),
            f.Sampling.of(request.params),
            output=pack_tokens(request.output_token_ids),
            text_length=request.text_length,
        )

    def resume(self, number: int) -> f.Resume:
        self.number = number
        self.trees.clear()
        self.is_open = False
        if not self.output:
            self.prompt_logprobs.clear()  # are told again from the first
        return f.Resume(number, self.token, len(self.tokens), self.memory_end or 0, len(self.text) + self.request.text_length)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt_token_ids) :]

    @property
    def wants_to_draft(self) -> bool:
        return self.finish_reason is None and len(self.trees) < self.most_in_flight and self.is_open

    def draft(self) -> f.Verify:
        tree = offered(self.chance, len(self.tokens), self.expected[len(self.output) :])
        self.step += 1
        frame = f.Verify(self.number, self.step, tree.length, pack_tokens(tree.tokens), pack_rows(tree.parents))
        self.trees.append(frame)
        return frame

    def take(self, frame: f.ServerFrame) -> None:
        """Take note of what a server says, which has to be what comes next."""
        assert frame.session == self.number  # type: ignore[union-attr]
        match frame:
            case f.Opened():
                assert self.token in (b"", frame.resume_token)
                self.token, self.step, self.is_open = frame.resume_token, frame.step, True
                assert frame.length >= len(self.tokens)
            case f.Memory():
                self._remember(frame.first, frame.rows)
            case f.Result():
                self._gain(frame)
            case _:
                raise AssertionError(frame)

    def _remember(self, first: int, rows: bytes) -> None:
        assert self.memory_end in (None, first)
        self.memory_end = first + len(rows) // ROW_BYTES

    def _gain(self, frame: f.Result) -> None:
        assert frame.first == len(self.tokens)
        if frame.memory:
            self._remember(frame.memory_first, frame.memory)
        tokens = unpack_tokens(frame.tokens)
        self.last = frame
        if self.trees and self.trees[0].step == frame.step:
            self._follow(self.trees.popleft(), unpack_rows(frame.accepted), tokens)
        else:
            assert not frame.accepted and frame.step <= self.step
        self.tokens += tokens
        self.text += frame.text_delta
        self.logprobs += frame.logprobs or ()
        self.prompt_logprobs += frame.prompt_logprobs or ()
        self.finish_reason = frame.finish_reason
        assert self.output == self.expected[: len(self.output)]
        if self.finish_reason is None and tokens and self.request.params.speculative:
            assert self.memory_end == len(self.tokens) - 1

    def _follow(self, tree: f.Verify, rows: list[int], tokens: list[int]) -> None:
        nodes, parents = unpack_tokens(tree.tokens), unpack_rows(tree.parents)
        self.num_accepted += len(rows)
        assert [nodes[row - 1] for row in rows] == tokens[: len(rows)]
        for above, below in pairwise(rows):
            assert parents[below - 1] == above


ROW_BYTES = 36
"""Of N0's random drafter with an entry, at int8."""


async def write(connection: Connection, texts: list[Text], until: Callable[[], bool] = lambda: False) -> None:
    """Let texts be written that are open on a connection, until all have ended or ``until`` says so."""
    by_number = {text.number: text for text in texts}
    while not until() and any(text.finish_reason is None for text in texts):
        for text in texts:
            while text.wants_to_draft and text.chance.random() < 0.7:
                connection.tell(text.draft())
            if text.wants_to_draft and not text.trees:
                connection.tell(text.draft())
        frame = await connection.hear()
        by_number[frame.session].take(frame)  # type: ignore[union-attr]
