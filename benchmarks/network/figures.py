"""What runs come to: medians and quartiles, shares of a token, and how many texts were the same."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.network.asking import Answer, Cost
from benchmarks.network.kinds import PLAIN
from benchmarks.network.measuring import Crowd, Results, Run

Key = tuple[str, float, str]
"""Link, temperature, kind."""
CrowdKey = tuple[float, str]
"""Temperature, kind."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of runs."""

    median: float
    p25: float
    p75: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value."""
        known = list(values)
        if len(known) == 1:
            return cls(known[0], known[0], known[0])
        low, middle, high = statistics.quantiles(known, n=4, method="inclusive")
        return cls(middle, low, high)


@dataclass(frozen=True, slots=True)
class Shares:
    """What a token costs: bytes up and down at the link, seconds of the server's engine, processor seconds (None: not told).

    ``wire_up`` and ``wire_down`` count headers and what was sent again too; ``told_up`` and ``told_down`` are what the edge says
    that it sent and received, None where there is none. ``server_calls`` come for each token.
    """

    up: float
    down: float
    wire_up: float
    wire_down: float
    told_up: float | None
    told_down: float | None
    server_calls: float | None
    busy: float
    steps: float
    server_cpu: float | None
    edge_cpu: float | None

    @classmethod
    def of(cls, answers: Sequence[Answer], costs: Sequence[Cost], *, has_edge: bool) -> Shares:
        """All tokens over everything spent."""
        tokens = max(1, sum(answer.tokens for answer in answers))

        def told(name: str) -> float | None:
            values = [answer.stats.get(name) for answer in answers]
            known = [float(value) for value in values if value is not None]
            return sum(known) / tokens if known and len(known) == len(values) else None

        def cpu(seconds: Callable[[Cost], float | None]) -> float | None:
            known = [value for value in map(seconds, costs) if value is not None]
            return sum(known) / tokens if known and len(known) == len(costs) else None

        def link(name: str) -> float:
            total: int = sum(getattr(cost.traffic, name) for cost in costs)
            return total / tokens

        return cls(
            up=link("up"),
            down=link("down"),
            wire_up=link("wire_up"),
            wire_down=link("wire_down"),
            told_up=told("bytes_sent"),
            told_down=told("bytes_received"),
            server_calls=told("num_server_calls") if has_edge else len(answers) / tokens,
            busy=sum(cost.busy for cost in costs) / tokens,
            steps=sum(cost.steps for cost in costs) / tokens,
            server_cpu=cpu(lambda cost: cost.server_cpu),
            edge_cpu=cpu(lambda cost: cost.edge_cpu),
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """One kind over one link at one temperature; ``same`` of ``runs`` texts were those of plain streaming.

    ``first`` (seconds) and ``speed`` (tokens per second) are spread over all runs, ``first_by_round`` and ``speed_by_round`` are
    the medians of each round: how far these lie apart says what a difference between kinds is worth.
    """

    runs: int
    tokens: int
    first: Spread
    speed: Spread
    first_by_round: tuple[float, ...]
    speed_by_round: tuple[float, ...]
    decode_speed: Spread | None
    tau: float
    shares: Shares
    same: int


@dataclass(frozen=True, slots=True)
class CrowdFigures:
    """Many clients at once; ``capacity`` are tokens for each second that the server's engine was at its steps."""

    clients: int
    runs: int
    tokens: int
    speed: float
    capacity: float
    tokens_per_step: float
    first: Spread
    tau: float
    shares: Shares
    same: int


def figures(results: Results) -> dict[Key, Figures]:
    """Of single clients, in the order in which they were measured."""
    expected = references(results)
    groups: dict[Key, list[Run]] = {}
    for run in results.runs:
        groups.setdefault((run.link, run.temperature, run.kind), []).append(run)
    return {key: _figures(runs, expected) for key, runs in groups.items()}


def _figures(runs: Sequence[Run], expected: dict[tuple[float, int], str]) -> Figures:
    answers = [run.answer for run in runs]
    rounds = [[run.answer for run in runs if run.round == number] for number in sorted({run.round for run in runs})]
    decoding = [speed for answer in answers if (speed := answer.decode_tokens_per_second) is not None]
    return Figures(
        runs=len(runs),
        tokens=sum(answer.tokens for answer in answers),
        first=Spread.of(answer.first for answer in answers),
        speed=Spread.of(answer.tokens_per_second for answer in answers),
        first_by_round=tuple(statistics.median(answer.first for answer in each) for each in rounds),
        speed_by_round=tuple(statistics.median(answer.tokens_per_second for answer in each) for each in rounds),
        decode_speed=Spread.of(decoding) if decoding else None,
        tau=acceptance_length(answers),
        shares=Shares.of(answers, [run.cost for run in runs], has_edge=_has_edge(runs[0].kind)),
        same=sum(run.answer.text == expected.get((run.temperature, run.prompt)) for run in runs),
    )


def crowd_figures(results: Results) -> dict[CrowdKey, CrowdFigures]:
    """Of many clients."""
    expected = references(results)
    return {(crowd.temperature, crowd.kind): _crowd_figures(crowd, expected) for crowd in results.crowds}


def _crowd_figures(crowd: Crowd, expected: dict[tuple[float, int], str]) -> CrowdFigures:
    answers = crowd.answers
    tokens = sum(answer.tokens for answer in answers)
    prompts = 1 + max((prompt for _, prompt in expected), default=0)
    texts = [expected.get((crowd.temperature, number % prompts)) for number in range(len(answers))]
    return CrowdFigures(
        clients=crowd.clients,
        runs=len(answers),
        tokens=tokens,
        speed=tokens / crowd.seconds,
        capacity=tokens / crowd.cost.busy if crowd.cost.busy else 0.0,
        tokens_per_step=tokens / max(1, crowd.cost.steps),
        first=Spread.of(answer.first for answer in answers),
        tau=acceptance_length(answers),
        shares=Shares.of(answers, [crowd.cost], has_edge=_has_edge(crowd.kind)),
        same=sum(answer.text == text for answer, text in zip(answers, texts, strict=True)),
    )


def references(results: Results) -> dict[tuple[float, int], str]:
    """What plain streaming said first, by temperature and prompt."""
    texts: dict[tuple[float, int], str] = {}
    for run in results.runs:
        if run.kind == PLAIN:
            texts.setdefault((run.temperature, run.prompt), run.answer.text)
    return texts


def acceptance_length(answers: Iterable[Answer]) -> float:
    """τ over all verifications that carried a draft; 1 where there was none."""
    steps = gained = 0
    for answer in answers:
        steps += answer.stats.get("num_spec_steps", 0)
        gained += answer.stats.get("num_accepted_draft_tokens", 0)
    return 1 + gained / steps if steps else 1.0


def _has_edge(kind: str) -> bool:
    return kind.startswith("edge")
