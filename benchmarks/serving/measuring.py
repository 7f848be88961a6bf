"""`moaserve bench serving`: every way under the same load, in turn, at each rate and in each round."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final, Protocol

import httpx

from benchmarks.network.processes import pinned
from benchmarks.serving.arrivals import Arrival, Workload
from benchmarks.serving.client import Outcome, ask
from benchmarks.serving.hosting import Cost, Other, Place, ServerError, hosted
from benchmarks.serving.loads import closed_loop, open_loop, sustained_rate
from benchmarks.serving.slo import Slo
from benchmarks.serving.ways import Own

WARM_UP: Final = 8
"""Requests that a server answers in each way before anything is measured."""
ALONE: Final = 8
"""Requests, one at a time, that tell what an idle server takes."""
FULL: Final = 4
"""Capacity is measured on so many requests for each that the server decodes at a time."""
_PREPARING: Final = 1_000_000
"""Number of the round that is asked before the others."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: ``rounds`` of each rate, in which every way gets the same requests at the same times.

    ``rates`` are requests a second, or, with ``of_capacity``, shares of what plain decoding sustains with ``at_once`` requests at
    any time. That capacity is measured where rates need it or ``with_capacity`` asks for it. ``slo`` None: ``Slo.of_idle_server``.
    """

    host: Own | Other
    ways: Sequence[str]
    workload: Workload
    rates: Sequence[float]
    of_capacity: bool
    with_capacity: bool
    rounds: int
    at_once: int
    body: dict[str, Any]
    slo: Slo | None
    timeout: float
    server_cores: frozenset[int] | None
    client_cores: frozenset[int] | None


@dataclass(frozen=True, slots=True)
class Capacity:
    """What plain decoding sustains, ``at_once`` requests at any time."""

    requests_per_second: float
    tokens_per_second: float
    at_once: int


@dataclass(frozen=True, slots=True)
class Alone:
    """Medians of answers that had the server to themselves, plainly decoded; seconds."""

    ttft: float
    tpot: float | None
    e2e: float


@dataclass(frozen=True, slots=True)
class Run:
    """One way, rate and round: those requests that count, what became of each, and what all took.

    ``seconds`` are from when the first of them was due to the end of the rate's time, or to that of the last answer, which comes
    later under load: throughput is over these. ``client_share`` of a processor is what this process
    used meanwhile, and ``wall`` the seconds that ``cost`` and it are of (the warm-up's too).
    """

    way: str
    rate: float
    round: int
    arrivals: Sequence[Arrival]
    outcomes: Sequence[Outcome]
    seconds: float
    wall: float
    cost: Cost
    client_share: float


@dataclass(slots=True)
class Results:
    """Everything that was measured; ``failures`` are what went wrong beside requests that count."""

    capacity: Capacity | None = None
    alone: Alone | None = None
    slo: Slo | None = None
    rates: Sequence[float] = ()
    runs: list[Run] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Watcher(Protocol):
    """Whom a measurement tells how far it is."""

    def expect(self, requests: int, seconds: float) -> None:
        """So many requests will be sent, over so much time at least."""

    def begin(self, what: str) -> None:
        """This is measured now."""

    def answered(self) -> None:
        """One more request has ended."""

    def noted(self) -> None:
        """One more round of a rate is among the results."""


async def measure(plan: Plan, results: Results, watcher: Watcher) -> None:
    """Run the plan, and add to ``results``; raises ProcessError for servers that do not start, ServerError for those that fail."""
    with pinned(plan.client_cores), _frozen():
        async with hosted(plan.host, plan.ways, plan.server_cores) as places:
            await _prepare(plan, places, results)
            rates, workload = results.rates, plan.workload
            each = len(places) * plan.rounds
            watcher.expect(
                each * sum(workload.warm_up + workload.requests(rate) for rate in rates),
                each * sum((workload.warm_up + workload.requests(rate)) / rate for rate in rates),
            )
            turn = 0
            # Rounds outside, so that what changes with time falls on all rates alike.
            for round in range(plan.rounds):
                for rate in rates:
                    for place in (*places[turn:], *places[:turn]):
                        watcher.begin(f"{place.way}, {rate:.3g}/s, round {round + 1} of {plan.rounds}")
                        try:
                            results.runs.append(await _load(plan, place, rate, round, watcher, results.failures))
                        except httpx.HTTPError as error:
                            raise ServerError(f"{place.way}: /metrics: {type(error).__name__} {error}") from error
                    turn = (turn + 1) % len(places)
                    watcher.noted()


async def _prepare(plan: Plan, places: Sequence[Place], results: Results) -> None:
    """Wake servers up, and find out what rates and limits are made of."""
    full = plan.of_capacity or plan.with_capacity
    for place in places:
        # Memory that no request has used yet is slow at first: of a server at its capacity it would look like what requests cost.
        at_once = plan.at_once if full else min(WARM_UP, plan.at_once)
        await _closed(plan, place, max(WARM_UP, at_once), at_once, plain=False)
    if plan.slo is None or full:
        _, alone = await _closed(plan, places[0], ALONE, 1, plain=True)
        per_token = [each for outcome in alone if (each := outcome.per_token) is not None]
        results.alone = Alone(
            ttft=median(outcome.first for outcome in alone),
            tpot=median(per_token) if per_token else None,
            e2e=median(outcome.end for outcome in alone),
        )
        results.slo = Slo.of_idle_server(alone)
    if full:
        ends, answers = await _closed(plan, places[0], FULL * plan.at_once, plan.at_once, plain=True)
        rate = sustained_rate(ends, plan.at_once)
        results.capacity = Capacity(rate, rate * sum(each.tokens for each in answers) / len(answers), plan.at_once)
    results.slo = plan.slo or results.slo
    unit = results.capacity.requests_per_second if results.capacity and plan.of_capacity else 1.0
    results.rates = [float(f"{rate * unit:.4g}") for rate in plan.rates]


async def _closed(plan: Plan, place: Place, count: int, at_once: int, *, plain: bool) -> tuple[list[float], list[Outcome]]:
    """When each of a closed loop's requests ended, and their outcomes; raises ServerError where one fails."""
    chosen = [number % len(plan.workload.prompts) for number in range(count)]
    lengths = plan.workload.lengths(_PREPARING, chosen)
    requests = [
        place.request(plan.workload.prompts[prompt], plan.body | {"max_tokens": length, "seed": number}, plain=plain)
        for number, (prompt, length) in enumerate(zip(chosen, lengths, strict=True))
    ]

    async def send(number: int, due: float) -> tuple[float, Outcome]:
        outcome = await ask(place.address, requests[number], due, plan.timeout)
        return due + outcome.end, outcome

    with _undisturbed():
        results = await closed_loop(count, at_once, send)
    outcomes = [outcome for _, outcome in results]
    if failed := [outcome.error for outcome in outcomes if outcome.error is not None]:
        raise ServerError(f"{place.way}, warming up: {len(failed)} of {count} requests failed, the first with: {failed[0]}")
    return [end for end, _ in results], outcomes


async def _load(plan: Plan, place: Place, rate: float, round: int, watcher: Watcher, failures: list[str]) -> Run:
    """One round of a rate, in one way."""
    arrivals = plan.workload.arrivals(rate, round)
    requests = [
        place.request(plan.workload.prompts[each.prompt], plan.body | {"max_tokens": each.max_tokens, "seed": each.seed})
        for each in arrivals
    ]

    async def send(number: int, due: float) -> Outcome:
        outcome = await ask(place.address, requests[number], due, plan.timeout)
        watcher.answered()
        return outcome

    before = await place.cost()
    with _undisturbed():
        began, spent = time.perf_counter(), time.process_time()
        outcomes = await open_loop([arrival.at for arrival in arrivals], send)
        wall, spent = time.perf_counter() - began, time.process_time() - spent
    cost = await place.cost() - before
    pairs = list(zip(arrivals, outcomes, strict=True))
    lost = [outcome.error for arrival, outcome in pairs if not arrival.counts and outcome.error is not None]
    if lost:
        failures.append(f"{place.way}, {rate:g}/s, round {round + 1}: {len(lost)} warming up, the first with: {lost[0]}")
    counted = [(arrival, outcome) for arrival, outcome in pairs if arrival.counts]
    over = max(len(arrivals) / rate, *(arrival.at + outcome.end for arrival, outcome in counted))
    return Run(
        way=place.way,
        rate=rate,
        round=round,
        arrivals=[arrival for arrival, _ in counted],
        outcomes=[outcome for _, outcome in counted],
        seconds=over - counted[0][0].at,
        wall=wall,
        cost=cost,
        client_share=spent / wall,
    )


@contextmanager
def _frozen() -> Iterator[None]:
    """What this process has loaded by now is not looked at when garbage is collected."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No garbage collection meanwhile: it would hold up what is being timed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
