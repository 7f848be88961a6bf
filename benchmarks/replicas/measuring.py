"""What is measured of replicas."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from app.cluster_settings import ClusterSettings
from benchmarks.replicas.asking import FOLLOW_UPS, Answer, ask, opening
from benchmarks.replicas.hosting import Hosted
from speculative.prefix_cache import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Kills:
    """``kills`` replicas were killed under ``streams``; ``texts`` ended, ``same`` of them as in an undisturbed run."""

    kills: int
    streams: int
    texts: int
    same: int
    failed: int
    failovers: int
    longest_pauses: tuple[float, ...]
    seconds: float
    differences: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


async def kill(host: Hosted, kills: int, streams: int, max_tokens: int, seed: int = 0, most_seconds: float = 3600) -> Kills:
    """Kill replicas at random, whenever two are ready, while ``streams`` seeded texts are written over and over.

    None is killed after ``most_seconds``.
    """
    chance = random.Random(seed)
    expected = await asyncio.gather(*(ask(host.client, opening(number), max_tokens, number) for number in range(streams)))
    if failed := [answer.error for answer in expected if answer.error]:
        raise RuntimeError(failed[0])
    texts: list[tuple[int, Answer]] = []
    done = asyncio.Event()
    before, began = host.engine.num_failovers, time.monotonic()

    async def write(number: int) -> None:
        while not done.is_set():
            texts.append((number, await ask(host.client, opening(number), max_tokens, number)))

    killed: set[int] = set()

    async def end_replicas() -> None:
        while len(killed) < kills and time.monotonic() - began < most_seconds:
            ready = [state.pid for state in host.engine.replicas.values() if state.ready and state.pid not in killed]
            if len(ready) < 2:
                await asyncio.sleep(0.1)
                continue
            await asyncio.sleep(chance.uniform(0, 1.0))
            pid = chance.choice(ready)
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        done.set()

    await asyncio.gather(end_replicas(), *(write(number) for number in range(streams)))
    wrong = [(number, answer) for number, answer in texts if answer.error is None and answer.text != expected[number].text]
    failed_texts = [answer for _, answer in texts if answer.error is not None]
    return Kills(
        len(killed),
        streams,
        len(texts),
        len(texts) - len(wrong) - len(failed_texts),
        len(failed_texts),
        host.engine.num_failovers - before,
        tuple(sorted((round(answer.longest_pause, 3) for _, answer in texts), reverse=True)[:20]),
        round(time.monotonic() - began, 1),
        tuple(f"{number}: {answer.text!r} for {expected[number].text!r}" for number, answer in wrong[:3])
        + tuple(str(answer.error) for answer in failed_texts[:3]),
    )


@dataclass(frozen=True, slots=True)
class Chats:
    """Of ``follow_ups`` so many ``landed`` where what was said before is cached; ``cached`` is the share of it that was."""

    chats: int
    follow_ups: int
    landed: int
    cached: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"share": self.landed / self.follow_ups}


async def chat(host: Hosted, chats: int, turns: int, concurrency: int, max_tokens: int) -> Chats:
    """Chats of several turns, ``concurrency`` at once, taken up again in another order each turn.

    A turn has landed where its prefix is if the prompt of the turn before was cached, but for its last block: chats have less in
    common. Its answer may be written in other tokens when it comes back.
    """
    histories = [opening(1000 + number) for number in range(chats)]
    lengths, prompts, landed, known, cached = [0] * chats, [0] * chats, 0, 0, 0
    places = asyncio.Semaphore(concurrency)

    async def turn(number: int, which: int) -> None:
        nonlocal landed, known, cached
        async with places:
            answer = await ask(host.client, histories[number], max_tokens, number, ignore_eos=False)
        if answer.error is not None:
            raise RuntimeError(answer.error)
        if which:
            landed += answer.cached_tokens >= BLOCK_TOKENS * (prompts[number] // BLOCK_TOKENS - 1)
            known += lengths[number]
            cached += min(answer.cached_tokens, lengths[number])
        lengths[number], prompts[number] = answer.prompt_tokens + answer.tokens, answer.prompt_tokens
        follow_up = {"role": "user", "content": FOLLOW_UPS[(number + which) % len(FOLLOW_UPS)]}
        histories[number] += [{"role": "assistant", "content": answer.text}, follow_up]

    for which in range(turns):
        order = random.Random(which).sample(range(chats), chats)
        await asyncio.gather(*(turn(number, which) for number in order))
    return Chats(chats, chats * (turns - 1), landed, cached / known)


@dataclass(frozen=True, slots=True)
class Update:
    """All replicas were replaced by others with ``changes`` in ``seconds``, while ``requests`` were answered."""

    changes: dict[str, Any]
    seconds: float
    requests: int
    failed: int
    different: int | None
    median_seconds: float
    longest_seconds: float
    errors: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


async def update(
    host: Hosted, settings: ClusterSettings, changes: dict[str, Any], streams: int, max_tokens: int, *, same: bool
) -> Update:
    """Replace all replicas under load; with ``same`` texts are compared with those from before."""
    expected = await asyncio.gather(*(ask(host.client, opening(number), max_tokens, number) for number in range(streams)))
    answers: list[tuple[int, Answer, float]] = []
    done = asyncio.Event()

    async def write(number: int) -> None:
        while not done.is_set():
            began = time.monotonic()
            answer = await ask(host.client, opening(number), max_tokens, number)
            answers.append((number, answer, time.monotonic() - began))

    writing = asyncio.gather(*(write(number) for number in range(streams)))
    old, began = set(host.engine.replicas), time.monotonic()
    await host.cluster.replace(ClusterSettings(**settings.given() | changes))
    while old & set(host.engine.replicas):  # these still end their texts
        await asyncio.sleep(0.1)
    await host.all_ready(settings.replicas)
    seconds = time.monotonic() - began
    done.set()
    await writing
    errors = [answer.error for _, answer, _ in answers if answer.error is not None]
    different = sum(answer.error is None and answer.text != expected[number].text for number, answer, _ in answers)
    took = [each for _, _, each in answers]
    return Update(
        changes, round(seconds, 1), len(answers), len(errors), different if same else None,
        round(statistics.median(took), 3), round(max(took), 3), tuple(map(str, errors[:3])),
    )  # fmt: skip
