"""`moaserve bench network`: every kind, over every link, with the same prompts and seeds, in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from benchmarks.network.asking import Answer, AnswerError, Cost
from benchmarks.network.kinds import Kind, Pair
from benchmarks.network.links import Link
from benchmarks.network.processes import Cores, ProcessError, pinned
from benchmarks.network.stage import Place, Stage
from benchmarks.network.transports import TransportName, open_transport
from benchmarks.prompts import Prompt

WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: ``rounds`` of all ``prompts`` for each kind, link and temperature.

    Then, over the link ``crowded_over``, ``clients`` at once (0: leave it out). Sampling's seed is ``seed`` and a prompt's number.
    """

    pair: Pair
    kinds: Sequence[Kind]
    links: Sequence[Link]
    temperatures: Sequence[float]
    prompts: Sequence[Prompt]
    rounds: int
    max_tokens: int
    seed: int
    clients: int
    crowded_over: Link
    transport: TransportName
    cores: Cores | None

    @property
    def num_requests(self) -> int:
        """How often ``progress`` is called: after each request of one client, and each crowd."""
        alone = len(self.kinds) * len(self.links) * len(self.temperatures) * self.rounds * len(self.prompts)
        return alone + (len(self.kinds) * len(self.temperatures) if self.clients else 0)

    def parameters(self, number: int, temperature: float) -> dict[str, Any]:
        """Of the request for a prompt."""
        return {"temperature": temperature, "seed": self.seed + number, "max_tokens": self.max_tokens}


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt asked alone, in round number ``round`` of all."""

    kind: str
    link: str
    temperature: float
    round: int
    prompt: int
    answer: Answer
    cost: Cost


@dataclass(frozen=True, slots=True)
class Crowd:
    """Many clients at once: all their answers, in prompt order, and what they took together."""

    kind: str
    link: str
    temperature: float
    clients: int
    answers: Sequence[Answer]
    seconds: float
    cost: Cost


@dataclass(slots=True)
class Results:
    """Everything that was measured, and what became of requests that failed."""

    runs: list[Run] = field(default_factory=list)
    crowds: list[Crowd] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Watcher:
    """Whom a measurement tells how far it is: that one more of ``Plan.num_requests`` has ended, and that a round, or a crowd, is
    among the results as a whole.
    """

    asked: Callable[[], object]
    noted: Callable[[], object]


async def measure(plan: Plan, results: Results, watcher: Watcher) -> None:
    """Run the plan, and add to ``results``; raises ProcessError and NetworkError for what cannot start.

    What fails after that is noted there, and all else goes on.
    """
    slots = max(plan.clients, 1)
    with pinned(plan.cores.client if plan.cores else None):
        async with (
            open_transport(plan.transport, plan.seed) as transport,
            Stage.open(transport, plan.pair, plan.cores, plan.kinds, slots) as stage,
        ):
            async with AsyncExitStack() as stack:
                places = [await stack.enter_async_context(stage.place(kind)) for kind in plan.kinds]
                for link in plan.links:
                    transport.shape(link)
                    await _alone(plan, stage, places, link, results, watcher)
            if plan.clients:
                transport.shape(plan.crowded_over)
                for kind in plan.kinds:
                    await _crowded(plan, stage, kind, results, watcher)


async def _alone(plan: Plan, stage: Stage, places: Sequence[Place], link: Link, results: Results, watcher: Watcher) -> None:
    """All kinds over one link, prompt by prompt, taking turns at going first."""
    for place in places:
        # The first request over a link pays for connections, and tells an edge how long the link is.
        try:
            await stage.ask(place, plan.prompts[0].token_ids, **plan.parameters(0, 0.0) | {"max_tokens": WARM_UP_TOKENS})
        except AnswerError as error:
            results.failures.append(f"{place.kind.name}, {link.name}, warming up: {error}")
    turn = 0
    # Rounds outside, so that what changes with time (another program's load) falls on both temperatures alike.
    for round in range(plan.rounds):
        for temperature in plan.temperatures:
            for number, prompt in enumerate(plan.prompts):
                for place in (*places[turn:], *places[:turn]):
                    try:
                        answer, cost = await stage.ask(place, prompt.token_ids, **plan.parameters(number, temperature))
                    except AnswerError as error:
                        results.failures.append(f"{place.kind.name}, {link.name}, temperature {temperature:g}: {error}")
                    else:
                        results.runs.append(Run(place.kind.name, link.name, temperature, round, number, answer, cost))
                    watcher.asked()
                turn = (turn + 1) % len(places)
        watcher.noted()


async def _crowded(plan: Plan, stage: Stage, kind: Kind, results: Results, watcher: Watcher) -> None:
    """Every client asks at least two prompts, so that few moments have fewer than all at work."""
    count = max(len(plan.prompts), 2 * plan.clients)
    prompts = [plan.prompts[number % len(plan.prompts)].token_ids for number in range(count)]
    size, left = len(plan.prompts), list(plan.temperatures)
    warm_up = plan.parameters(0, 0.0) | {"max_tokens": WARM_UP_TOKENS}
    try:
        async with stage.place(kind, plan.clients) as place:
            await stage.load(place, prompts[: plan.clients], [warm_up] * plan.clients)
            while left:
                temperature = left[0]
                parameters = [plan.parameters(number % size, temperature) for number in range(count)]
                try:
                    answers, seconds, cost = await stage.load(place, prompts, parameters)
                except AnswerError as error:
                    results.failures.append(f"{kind.name}, {plan.clients} at once, temperature {temperature:g}: {error}")
                else:
                    who = kind.name, plan.crowded_over.name, temperature
                    results.crowds.append(Crowd(*who, plan.clients, answers, seconds, cost))
                del left[0]
                watcher.asked()
                watcher.noted()
    except (AnswerError, ProcessError) as error:
        results.failures.append(f"{kind.name}, {plan.clients} at once: {error}")
        for _ in left:
            watcher.asked()
