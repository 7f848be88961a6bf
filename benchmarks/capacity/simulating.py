"""Sessions that ask, read and think, on a replica in simulated time; and what that gives in figures."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import numpy as np

from benchmarks.capacity.costs import Costs, Workload
from benchmarks.capacity.replica import Replica, Turn
from speculative.prefix_cache import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a replica did. Seconds for ``ttft``, ``tpot`` (a token after the first) and ``e2e``, rates a second, the rest a turn.

    ``read`` are tokens of prompts computed, of ``prompt`` in all; ``busy`` is the share of time in which the engine worked,
    ``running`` the texts that ran at a time, ``context`` the tokens of a text at its turn's end. Where no turn ended, times are
    NaN, which is within no goal.
    """

    turns: int
    turns_per_second: float
    tokens_per_second: float
    ttft_p50: float
    ttft_p99: float
    ttft_mean: float
    tpot_mean: float
    tpot_p99: float
    e2e_mean: float
    e2e_p50: float
    busy: float
    running: float
    prompt: float
    read: float
    fetched: float
    written: float
    blocks_asked: float
    context: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(slots=True)
class _Session:
    number: int
    text: int
    """Tokens of its text so far; 0 before its first turn."""


def simulate_sessions(
    costs: Costs,
    workload: Workload,
    sessions: int,
    *,
    seconds: float,
    warm_up: float,
    seed: int,
    redis_tokens: float = float("inf"),
) -> Simulated:
    """``sessions`` of them at a time on one replica; figures are of ``seconds`` after ``warm_up``.

    One that ends makes room for a new one. At the beginning each is somewhere in its course, and its text is kept as far as there
    is room.
    """
    rng = Random(seed)
    replica = Replica(costs, redis_tokens)
    waking: list[tuple[float, int, _Session]] = []
    turn_tokens = workload.question + workload.answer
    for number in range(sessions):
        past = _geometric(rng, workload.turns) - 1
        text = int(_length(rng, workload.first_prompt) + past * turn_tokens + workload.answer) if past else 0
        session = _Session(number, min(text, costs.engine.max_model_len // 2))
        heapq.heappush(waking, (rng.random() * workload.think, number, session))
        if text:
            replica.prefixes.keep(number, session.text)
            replica.redis.keep(number, session.text)
    asking: dict[int, _Session] = {}
    number, done = sessions, []
    while replica.now < warm_up + seconds:
        while waking and waking[0][0] <= replica.now:
            asked, _, session = heapq.heappop(waking)
            asking[session.number] = session
            replica.offer(_next_turn(rng, workload, session, asked, costs.engine.max_model_len))
        if replica.next_ready > replica.now:
            replica.now = min(replica.next_ready, waking[0][0] if waking else float("inf"))
            continue
        for turn in replica.step():
            session = asking.pop(turn.session)
            session.text = turn.prompt + turn.answer
            room = costs.engine.max_model_len - session.text
            if rng.random() < 1 / workload.turns or room < 2 * turn_tokens:
                session = _Session(number, 0)
                number += 1
            heapq.heappush(waking, (turn.ended + rng.expovariate(1 / workload.think), session.number, session))
            if turn.ended >= warm_up:
                done.append(turn)
    return _figures(done, replica, replica.now - warm_up)


def simulate_requests(costs: Costs, requests: Sequence[tuple[float, int, int]], *, shares_core: bool) -> Simulated:
    """Requests that nobody has seen before: when each comes, its prompt's and its answer's tokens."""
    replica = Replica(costs, redis_tokens=0.0, shares_core=shares_core)
    coming, done = list(reversed(requests)), []
    while coming or replica.next_ready < float("inf"):
        while coming and coming[-1][0] <= replica.now:
            asked, prompt, answer = coming.pop()
            replica.offer(Turn(len(coming), asked, prompt, answer, here=False))
        if replica.next_ready > replica.now:
            replica.now = min(replica.next_ready, coming[-1][0] if coming else float("inf"))
            continue
        done += replica.step()
    return _figures(done, replica, replica.now)


def _next_turn(rng: Random, workload: Workload, session: _Session, asked: float, most: int) -> Turn:
    new = _length(rng, workload.question if session.text else workload.first_prompt)
    answer = _length(rng, workload.answer)
    prompt = max(1, min(session.text + new, most - 2))
    return Turn(session.number, asked, prompt, max(1, min(answer, most - prompt)), here=rng.random() < workload.affinity)


def _length(rng: Random, mean: float) -> int:
    return 1 + int(rng.expovariate(1 / mean))


def _geometric(rng: Random, mean: float) -> int:
    count = 1
    while rng.random() > 1 / mean:
        count += 1
    return count


def _figures(turns: Sequence[Turn], replica: Replica, seconds: float) -> Simulated:
    def each(name: str) -> float:
        return float(np.mean([getattr(turn, name) for turn in turns])) if turns else 0.0

    firsts = np.array([turn.first - turn.asked for turn in turns] or [np.nan])
    gaps = np.array([(turn.ended - turn.first) / (turn.answer - 1) for turn in turns if turn.answer > 1] or [np.nan])
    whole = np.array([turn.ended - turn.asked for turn in turns] or [np.nan])
    return Simulated(
        turns=len(turns),
        turns_per_second=len(turns) / seconds,
        tokens_per_second=sum(turn.answer for turn in turns) / seconds,
        ttft_p50=float(np.median(firsts)),
        ttft_p99=float(np.quantile(firsts, 0.99)),
        ttft_mean=float(firsts.mean()),
        tpot_mean=float(gaps.mean()),
        tpot_p99=float(np.quantile(gaps, 0.99)),
        e2e_mean=float(whole.mean()),
        e2e_p50=float(np.median(whole)),
        busy=replica.busy / replica.now if replica.now else 0.0,
        running=replica.text_seconds / replica.now if replica.now else 0.0,
        prompt=each("prompt"),
        read=each("read"),
        fetched=each("fetched"),
        written=each("written"),
        blocks_asked=each("blocks_asked") + each("prompt") / BLOCK_TOKENS,
        context=each("prompt") + each("answer"),
    )
