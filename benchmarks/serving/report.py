"""Results of `moaserve bench serving` for a terminal, and as files to keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from benchmarks import printing
from benchmarks.machine import provenance
from benchmarks.network.figures import Spread
from benchmarks.serving.figures import Figures, Percentiles, Row, doubts, pooled
from benchmarks.serving.keeping import Kept, rows, write
from benchmarks.serving.measuring import Plan, Results


def print_results(results: Results, plan: Plan, compared: Kept | None, notes: Sequence[str]) -> None:
    """Three tables for each rate, and what to read them with; ``notes`` stand at the end."""
    console = printing.console()
    found = rows(results, compared.plain if compared else None)
    every = pooled([*found, *(compared.rows if compared else ())])
    for rate in results.rates:
        here = {way: each for (at, way), each in every.items() if at == rate}
        if not here:
            continue
        share = f" ({rate / results.capacity.requests_per_second:.2f} of capacity)" if results.capacity else ""
        console.print(_latencies(f"{rate:g} requests/s{share}; ms, p50/p90/p99", here), _speed_ups(here), _throughput(here))
    if (capacity := results.capacity) is not None:
        console.print(
            f"Capacity: plain decoding sustains {capacity.requests_per_second:.2f} requests/s, {capacity.tokens_per_second:.0f} "
            f"tokens/s, {capacity.at_once} at a time."
        )
    if results.slo is not None:
        console.print(f"Goodput counts answers with {results.slo.line()}.")
    for line in (*_generator(found), *failing(results), *notes):
        console.print(line)
    console.print(provenance().line())


def failing(results: Results) -> list[str]:
    """What went wrong: requests by their error, and all else."""
    errors: dict[tuple[str, float, str], int] = {}
    for run in results.runs:
        for outcome in run.outcomes:
            if outcome.error is not None:
                key = (run.way, run.rate, outcome.error)
                errors[key] = errors.get(key, 0) + 1
    told = [f"FAILED: {way}, {rate:g}/s: {count} requests: {error}" for (way, rate, error), count in errors.items()]
    return told + [f"FAILED: {failure}" for failure in results.failures]


def _generator(found: Sequence[Row]) -> list[str]:
    every = pooled(found).values()
    late = [each.late.p99 for each in every if each.late is not None]
    if not late:
        return []
    share, latest = max(each.client_share for each in every), max(each.latest for each in every)
    lines = [
        f"The generator sent 99% of the requests within {max(late) * 1e3:.1f} ms of their time (the latest came "
        f"{latest * 1e3:.1f} ms after it), and used {share:.0%} of a processor at most."
    ]
    others = [each.others_cpu_share for each in every if each.others_cpu_share is not None]
    lines += [f"Servers that were not asked used {max(others):.1%} of a processor at most."] if others else []
    return lines + [f"DOUBTFUL: {doubt}." for doubt in doubts(found)]


def _table(title: str | None, *names: str) -> Table:
    return printing.table(title, ("", *names))


def _latencies(title: str, here: Mapping[str, Figures]) -> Table:
    table = _table(title, "first token", "between texts", "per token", "end to end")
    for way, each in here.items():
        table.add_row(way, *map(_percentiles, (each.ttft, each.itl, each.tpot, each.e2e)))
    return table


def _speed_ups(here: Mapping[str, Figures]) -> Table:
    table = _table(None, "over off, end to end", "τ", "drafted", "same text", "failed")
    for way, each in here.items():
        up = each.speed_up
        table.add_row(
            way,
            "–" if up is None else _spread(up.e2e),
            "–" if each.tau is None else f"{each.tau:.2f}",
            "–" if each.drafted is None else f"{each.drafted:.0%}",
            "–" if up is None else f"{up.same} of {up.pairs}",
            f"{each.failed} of {each.requests}",
        )
    return table


def _throughput(here: Mapping[str, Figures]) -> Table:
    table = _table(None, "tokens/s", "requests/s", "goodput", "in flight", "busy")
    for way, each in here.items():
        table.add_row(
            way,
            f"{each.tokens_per_second:.1f}",
            f"{each.requests_per_second:.2f}",
            f"{each.goodput:.2f}",
            f"{each.in_flight:.1f}",
            "–" if each.busy is None else f"{each.busy:.0%}",
        )
    return table


def _percentiles(each: Percentiles | None) -> str:
    if each is None:
        return "–"
    values = [value * 1e3 for value in (each.p50, each.p90, each.p99)]
    return "/".join(f"{value:.{0 if value >= 100 else 1}f}" for value in values)


def _spread(spread: Spread) -> str:
    return f"{spread.median:.2f}x ({spread.p25:.2f}–{spread.p75:.2f})"


def write_all(results: Results, plan: Plan, compared: Kept | None, notes: Sequence[str], folder: Path) -> list[Path]:
    """results.json, then pictures; raises ImportError without matplotlib."""
    written = [write(results, plan, compared, notes, folder)]
    from benchmarks.serving.drawing import draw

    found = rows(results, compared.plain if compared else None)
    everything = [*found, *(compared.rows if compared else ())]
    workload = plan.workload
    measured = len({run.round for run in results.runs})  # which it may be stopped before all of
    rounds = "1 round" if measured == 1 else f"{measured} rounds"
    what = f"{len(workload.prompts)} prompts, answers of at most {workload.max_tokens} tokens, {rounds}"
    capacity = results.capacity.requests_per_second if results.capacity else None
    return [*written, *draw(pooled(everything), folder, what=what, capacity=capacity)]
