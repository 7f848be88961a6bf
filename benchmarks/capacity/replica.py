"""One replica in simulated time: its engine step by step, its prefix cache, and its share of Redis."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from app.sessions.conversations import WORTHWHILE
from benchmarks.capacity.costs import Costs
from speculative.prefill_budget import PrefillBudget, ReadingCosts
from speculative.prefix_cache import BLOCK_TOKENS


@dataclass(slots=True)
class Turn:
    """A question of ``session`` at ``asked``: its prompt's tokens, its answer's, and what becomes of it, in seconds and tokens.

    ``here`` says that it lands where its prefix is.
    """

    session: int
    asked: float
    prompt: int
    answer: int
    here: bool = True
    known: int = 0
    fetched: int = 0
    written: int = 0
    blocks_asked: int = 0
    read: int = 0
    first: float = 0.0
    ended: float = 0.0


class Kept:
    """Texts by session, of which the longest unused give way; tokens of each, at most ``room`` of all."""

    def __init__(self, room: float) -> None:
        self.room, self.total = room, 0
        self._texts: OrderedDict[int, int] = OrderedDict()

    def tokens(self, session: int) -> int:
        """Of a session's text; 0 where nothing of it is kept."""
        return self._texts.get(session, 0)

    def keep(self, session: int, tokens: int) -> None:
        """Now its text has so many, and is the newest in use."""
        self.total += tokens - self._texts.pop(session, 0)
        self._texts[session] = tokens
        while self.total > self.room and self._texts:
            self.total -= self._texts.popitem(last=False)[1]


@dataclass(slots=True)
class Replica:
    """Serves turns one step after another. ``redis_tokens`` is its share of what Redis can keep (0: there is none).

    With ``shares_core`` the event loop runs on the engine's core, and what HTTP costs delays its steps.
    """

    costs: Costs
    redis_tokens: float = float("inf")
    shares_core: bool = False
    now: float = 0.0
    busy: float = 0.0
    text_seconds: float = 0.0
    prefixes: Kept = field(init=False)
    redis: Kept = field(init=False)
    _fetching: list[tuple[float, int, Turn]] = field(default_factory=list)
    _waiting: deque[Turn] = field(default_factory=deque)
    _running: list[tuple[float, int, Turn]] = field(default_factory=list)
    _context: float = 0.0
    _gained: float = 0.0
    _numbers: Iterator[int] = field(default_factory=lambda: iter(range(1 << 62)))
    _steps: tuple[list[float], list[float]] = field(init=False)
    _budget: PrefillBudget = field(init=False)

    def __post_init__(self) -> None:
        """Tabulate steps by batch, between those that are known and from the last two on."""
        engine = self.costs.engine
        self.prefixes, self.redis = Kept(engine.prefix_tokens), Kept(self.redis_tokens)
        batches = np.arange(engine.slots + 1)
        known = [step.batch for step in engine.steps]
        seconds = np.interp(batches, known, [step.seconds for step in engine.steps])
        tokens = np.interp(batches, known, [step.tokens for step in engine.steps])
        self._steps = seconds.tolist(), tokens.tolist()
        self._budget = PrefillBudget(engine.prefill_chunk, ReadingCosts(engine.read_pass, engine.read_token, engine.read_pair))

    def offer(self, turn: Turn) -> None:
        """A question that comes now: what is known of it is looked up, here and in Redis."""
        most = max(0, turn.prompt - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        turn.known = min(most, self.prefixes.tokens(turn.session)) if turn.here else 0
        ready = turn.asked
        if self.redis.room > 0 and most - turn.known >= WORTHWHILE * BLOCK_TOKENS:
            sessions = self.costs.sessions
            turn.blocks_asked = (most - turn.known) // BLOCK_TOKENS
            reach = int(sessions.fetch_timeout / sessions.fetch_token) if sessions.fetch_token else most
            there = min(most, self.redis.tokens(turn.session), turn.known + reach) // BLOCK_TOKENS * BLOCK_TOKENS
            turn.fetched = max(0, there - turn.known)
            turn.known += turn.fetched
            ready += turn.fetched * sessions.fetch_token
        heapq.heappush(self._fetching, (ready, next(self._numbers), turn))

    @property
    def next_ready(self) -> float:
        """When it has something to do: now, or when a fetch ends; infinity where nothing is asked of it."""
        if self._running or self._waiting:
            return self.now
        return max(self.now, self._fetching[0][0]) if self._fetching else float("inf")

    def step(self) -> list[Turn]:
        """One step of the engine; turns that ended with it."""
        while self._fetching and self._fetching[0][0] <= self.now:
            self._waiting.append(heapq.heappop(self._fetching)[2])
        engine, http = self.costs.engine, self.costs.http
        batch = len(self._running)
        seconds = self._steps[0][batch] + engine.step_context * self._context if batch else 0.0
        gained = self._steps[1][batch] if batch else 0.0
        begun, reading = self._read(batch)
        if batch:
            self._budget.observe_step(batch, seconds)
        taken = seconds + reading
        if self.shares_core:
            taken += batch * gained * http.token_cpu + len(begun) * (http.request_cpu + http.token_cpu)
        self.now += taken
        self.busy += taken
        self.text_seconds += taken * batch
        self._gained += gained
        self._context += batch * gained
        for turn in begun:
            turn.first = self.now + (0.0 if self.shares_core else http.request_cpu)
            self._context += turn.prompt
            heapq.heappush(self._running, (self._gained + turn.answer - 1, next(self._numbers), turn))
        ended = []
        while self._running and self._running[0][0] <= self._gained:
            turn = heapq.heappop(self._running)[2]
            turn.ended = max(self.now, turn.first)
            self._context -= turn.prompt + turn.answer
            self._keep(turn)
            ended.append(turn)
        return ended

    def _read(self, batch: int) -> tuple[list[Turn], float]:
        """Prompts read to their end by this step, as much as a server's budget allows, and the seconds that reading takes."""
        engine, budget = self.costs.engine, self._budget
        free = engine.slots - batch
        begun: list[Turn] = []
        taken = 0.0
        budget.begin(batch, len(self._waiting) - 1)
        while self._waiting and free and budget.left:
            turn = self._waiting[0]
            behind = turn.known + turn.read
            part = budget.take(behind, turn.prompt - behind)
            if not part:
                break
            taken += engine.read(part, behind)
            turn.read += part
            if turn.known + turn.read >= turn.prompt:
                begun.append(self._waiting.popleft())
                free -= 1
        return begun, taken

    def _keep(self, turn: Turn) -> None:
        length = (turn.prompt + turn.answer - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        self.prefixes.keep(turn.session, length)
        if self.redis.room > 0:
            turn.written = max(0, length - self.redis.tokens(turn.session))
            self.redis.keep(turn.session, length)
