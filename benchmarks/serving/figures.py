"""What a load comes to: percentiles, throughput, goodput, τ, and how much sooner than plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.network.figures import Spread
from benchmarks.serving.client import Outcome
from benchmarks.serving.measuring import Run
from benchmarks.serving.slo import Slo
from benchmarks.serving.ways import OFF, WAYS

LATE_S: Final = 0.005
BUSY: Final = 0.5
"""From here on a reader is told that the generator may have been what was measured."""

Asked = tuple[float, int, int]
"""Rate, round and number of a request: the same for all ways."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles | None:
        """Between two values, the line between them; None of no values."""
        known = list(values)
        if not known:
            return None
        p50, p90, p99 = np.percentile(known, (50, 90, 99)).tolist()
        return cls(float(np.mean(known)), p50, p90, p99)


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """How many times as fast as the same requests plainly decoded: the spread over requests, and each round's median.

    ``e2e`` is from a request's time to its last token, for each of its tokens, so that answers of other lengths do not mislead;
    ``same`` of ``pairs`` texts were plain decoding's.
    """

    e2e: Spread
    ttft: Spread
    tpot: Spread | None
    e2e_by_round: tuple[float, ...]
    pairs: int
    same: int


@dataclass(frozen=True, slots=True)
class Figures:
    """One way at one rate; latencies are of requests that did not fail.

    ``ttft`` is the time to the first token, ``itl`` between pieces of text, ``tpot`` for each token after the first, ``e2e`` to the
    end, ``late`` what the generator lost. ``seconds`` are of all rounds; ``in_flight`` requests were being answered on average.
    ``tau`` are tokens per verification that carried a draft, ``drafted`` is the share of the target's passes that were such, and
    ``tokens_per_pass`` is of all passes, prompts' included.
    ``busy`` is the share of time that the server's engine was at its steps, ``server_cpu`` processor seconds a token.
    """

    requests: int
    failed: int
    tokens: int
    seconds: float
    requests_per_second: float
    tokens_per_second: float
    goodput: float
    in_flight: float
    ttft: Percentiles | None
    itl: Percentiles | None
    tpot: Percentiles | None
    e2e: Percentiles | None
    late: Percentiles | None
    latest: float
    tau: float | None
    drafted: float | None
    tokens_per_pass: float | None
    cached_share: float
    busy: float | None
    server_cpu: float | None
    others_cpu_share: float | None
    client_share: float
    speed_up: SpeedUp | None


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of a way at a rate, in one round (None: in all of them)."""

    way: str
    rate: float
    round: int | None
    figures: Figures


def baseline(runs: Sequence[Run], way: str = OFF) -> dict[Asked, Outcome]:
    """What became of each request that was plainly decoded."""
    return {
        (run.rate, run.round, number): outcome
        for run in runs
        if run.way == way
        for number, outcome in enumerate(run.outcomes)
        if outcome.error is None
    }


def figures(runs: Sequence[Run], slo: Slo | None, plain: Mapping[Asked, Outcome]) -> list[Row]:
    """Of each way and rate, in the order in which ways are named: of all rounds, then of each."""
    groups: dict[tuple[str, float], list[Run]] = {}
    order = {way: number for number, way in enumerate(WAYS)}
    for run in sorted(runs, key=lambda run: order.get(run.way, len(order))):
        groups.setdefault((run.way, run.rate), []).append(run)
    return [
        Row(way, rate, round, _figures(some, slo, plain))
        for (way, rate), all_rounds in groups.items()
        for round, some in ((None, all_rounds), *((run.round, [run]) for run in all_rounds))
    ]


def pooled(rows: Sequence[Row]) -> dict[tuple[float, str], Figures]:
    """Those of all rounds, by rate and way."""
    return {(row.rate, row.way): row.figures for row in rows if row.round is None}


def _figures(runs: Sequence[Run], slo: Slo | None, plain: Mapping[Asked, Outcome]) -> Figures:
    every = [outcome for run in runs for outcome in run.outcomes]
    good = [outcome for outcome in every if outcome.error is None]
    seconds = sum(run.seconds for run in runs)
    tokens = sum(outcome.tokens for outcome in good)
    passes = sum(outcome.passes or 0 for outcome in good)
    wall = sum(run.wall for run in runs)

    def spent(cost: Callable[[Run], float | None]) -> float | None:
        known = [each for run in runs if (each := cost(run)) is not None]
        return sum(known) if len(known) == len(runs) else None

    busy, server, others = (
        spent(lambda run: run.cost.busy),
        spent(lambda run: run.cost.server),
        spent(lambda run: run.cost.others),
    )
    return Figures(
        requests=len(every),
        failed=len(every) - len(good),
        tokens=tokens,
        seconds=seconds,
        requests_per_second=len(good) / seconds,
        tokens_per_second=tokens / seconds,
        goodput=sum(slo is None or slo.met_by(outcome) for outcome in good) / seconds,
        in_flight=sum(outcome.end - outcome.late for outcome in every) / seconds,
        ttft=Percentiles.of(outcome.first for outcome in good),
        itl=Percentiles.of(gap for outcome in good for gap in outcome.gaps),
        tpot=Percentiles.of(each for outcome in good if (each := outcome.per_token) is not None),
        e2e=Percentiles.of(outcome.end for outcome in good),
        late=Percentiles.of(outcome.late for outcome in every),
        latest=max((outcome.late for outcome in every), default=0.0),
        tau=_tau(good),
        drafted=sum(outcome.drafts or 0 for outcome in good) / passes if passes else None,
        tokens_per_pass=tokens / passes if passes else None,
        cached_share=sum(outcome.cached_tokens for outcome in good) / max(1, sum(outcome.prompt_tokens for outcome in good)),
        busy=None if busy is None else busy / wall,
        server_cpu=None if server is None else server / max(1, tokens),
        others_cpu_share=None if others is None else others / wall,
        client_share=sum(run.client_share * run.wall for run in runs) / wall,
        speed_up=_speed_up(runs, plain),
    )


def _tau(outcomes: Sequence[Outcome]) -> float | None:
    """Over all verifications that carried a draft; 1 where there was none, None where the server does not tell."""
    known = [outcome for outcome in outcomes if outcome.drafts is not None]
    drafts = sum(outcome.drafts or 0 for outcome in known)
    return (1 + sum(outcome.accepted or 0 for outcome in known) / drafts if drafts else 1.0) if known else None


def _speed_up(runs: Sequence[Run], plain: Mapping[Asked, Outcome]) -> SpeedUp | None:
    rounds: list[list[float]] = []
    pairs: list[tuple[Outcome, Outcome]] = []
    for run in runs:
        asked = ((outcome, plain.get((run.rate, run.round, number))) for number, outcome in enumerate(run.outcomes))
        these = [(outcome, other) for outcome, other in asked if other is not None and outcome.error is None]
        rounds.append([_per_token(other) / _per_token(outcome) for outcome, other in these])
        pairs += these
    if not pairs:
        return None
    both = [(a, b) for outcome, other in pairs if (a := outcome.per_token) and (b := other.per_token)]
    return SpeedUp(
        e2e=Spread.of(ratio for ratios in rounds for ratio in ratios),
        ttft=Spread.of(other.first / outcome.first for outcome, other in pairs),
        tpot=Spread.of(b / a for a, b in both) if both else None,
        e2e_by_round=tuple(Spread.of(ratios).median for ratios in rounds if ratios),
        pairs=len(pairs),
        same=sum(outcome.text == other.text for outcome, other in pairs),
    )


def _per_token(outcome: Outcome) -> float:
    return outcome.end / max(1, outcome.tokens)


def doubts(rows: Sequence[Row]) -> list[str]:
    """Where the generator may have been what was measured."""
    told, every = [], pooled(rows)
    late = {key: each.late.p99 for key, each in every.items() if each.late is not None and each.late.p99 > LATE_S}
    busy = {key: each.client_share for key, each in every.items() if each.client_share > BUSY}
    if late:
        rate, way = max(late, key=lambda key: late[key])
        told.append(
            f"{len(late)} of {len(every)} loads had a hundredth of their requests sent more than {LATE_S * 1e3:g} ms late, "
            f"{way} at {rate:g}/s {late[rate, way] * 1e3:.1f} ms"
        )
    if busy:
        rate, way = max(busy, key=lambda key: busy[key])
        told.append(
            f"{len(busy)} of {len(every)} loads kept the generator busy, {way} at {rate:g}/s {busy[rate, way]:.0%} of the time"
        )
    return told
