"""Results of `moaserve bench network`: tables for a terminal, JSON and pictures to keep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from benchmarks import printing
from benchmarks.machine import provenance, write_json
from benchmarks.network.figures import CrowdFigures, Figures, Shares, Spread, crowd_figures, figures
from benchmarks.network.keeping import as_dict
from benchmarks.network.measuring import Plan, Results
from benchmarks.network.verdicts import differing, verdicts


def print_results(results: Results, plan: Plan, notes: list[str]) -> None:
    """Two tables for each link and temperature, two for many clients, and what to make of them; ``notes`` stand at the end."""
    console = printing.console()
    found, crowds = figures(results), crowd_figures(results)
    links = {link.name: link for link in plan.links}
    told = {(verdict.link, verdict.temperature): verdict.line() for verdict in verdicts(found)}
    for name, temperature in dict.fromkeys(key[:2] for key in found):
        here = {kind: each for (link, at, kind), each in found.items() if (link, at) == (name, temperature)}
        title = f"{links[name].describe()}; {_sampling(temperature)}; medians and quartiles, and the medians of rounds"
        speeds = _table(title, "first token, ms", "by round", "tokens/s", "by round", "decoding, tokens/s", "τ", "same text")
        for kind, each in here.items():
            speeds.add_row(kind, *_speeds(each))
        console.print(speeds, _costs({kind: each.shares for kind, each in here.items()}))
        console.print(told.get((name, temperature), "Plain streaming has failed: there is nothing to compare with."))
    for temperature in dict.fromkeys(key[0] for key in crowds):
        crowd = {kind: each for (at, kind), each in crowds.items() if at == temperature}
        title = f"{plan.clients} clients at once; {plan.crowded_over.describe()}; {_sampling(temperature)}"
        served = _table(title, "tokens per busy second", "tokens/s", "tokens per step", "first token, ms", "τ", "same text")
        for kind, of_many in crowd.items():
            served.add_row(kind, *_served(of_many))
        console.print(served, _costs({kind: each.shares for kind, each in crowd.items()}))
    different, total = differing([*found.values(), *crowds.values()])
    if different:
        console.print(f"NOT the same: {different} of {total} texts differ from plain streaming's. Only in bfloat16 near-ties may.")
    else:
        console.print(f"Lossless: all {total} texts were those of plain streaming.")
    for failure in results.failures:
        console.print(f"FAILED, and left out: {failure}")
    for note in notes:
        console.print(note)
    console.print(provenance().line())


def _table(title: str | None, *names: str) -> Table:
    return printing.table(title, ("", *names))


def _speeds(each: Figures) -> list[str]:
    decoding = "–" if each.decode_speed is None else _spread(each.decode_speed)
    first, speed = _spread(each.first, 1e3), _spread(each.speed)
    by_round = _range(each.first_by_round, 1e3), _range(each.speed_by_round)
    return [first, by_round[0], speed, by_round[1], decoding, f"{each.tau:.2f}", f"{each.same} of {each.runs}"]


def _served(each: CrowdFigures) -> list[str]:
    speeds = [f"{each.capacity:.0f}", f"{each.speed:.1f}", f"{each.tokens_per_step:.2f}"]
    return [*speeds, _spread(each.first, 1e3), f"{each.tau:.2f}", f"{each.same} of {each.runs}"]


def _costs(shares: dict[str, Shares]) -> Table:
    table = _table(
        None, "server calls per 100 tokens", "bytes up", "bytes down", "server busy, ms", "server CPU, ms", "edge CPU, ms"
    )
    table.caption = "per token, unless said; bytes without headers"
    for kind, each in shares.items():
        calls = "–" if each.server_calls is None else f"{100 * each.server_calls:.1f}"
        times = ("–" if seconds is None else f"{seconds * 1e3:.2f}" for seconds in (each.busy, each.server_cpu, each.edge_cpu))
        table.add_row(kind, calls, f"{each.up:.0f}", f"{each.down:.0f}", *times)
    return table


def _spread(spread: Spread, factor: float = 1.0) -> str:
    digits = 0 if spread.median * factor >= 100 else 1
    median, low, high = (f"{value * factor:.{digits}f}" for value in (spread.median, spread.p25, spread.p75))
    return f"{median} ({low}–{high})"


def _range(values: Sequence[float], factor: float = 1.0) -> str:
    low, high = min(values) * factor, max(values) * factor
    digits = 0 if low >= 100 else 1
    return f"{low:.{digits}f}" if len(values) == 1 else f"{low:.{digits}f}–{high:.{digits}f}"


def _sampling(temperature: float) -> str:
    return "greedy" if temperature == 0 else f"temperature {temperature:g}"


def write(results: Results, plan: Plan, notes: list[str], folder: Path) -> list[Path]:
    """Figures, every run and what they were measured with as results.json, and pictures; raises ImportError without matplotlib."""
    written = [write_figures(results, plan, notes, folder)]
    from benchmarks.network.drawing import draw

    what = f"{len(plan.prompts)} prompts, {plan.rounds} times each, at most {plan.max_tokens} tokens; medians and quartiles"
    found = figures(results)
    return [*written, *draw(found, folder, what=what)] if found else written


def write_figures(results: Results, plan: Plan, notes: list[str], folder: Path) -> Path:
    """results.json alone; what was there is replaced at once, so that there always is a whole one."""
    pair = plan.pair
    settings = {
        "model": pair.model,
        "drafter": pair.drafter,
        "dtype": pair.dtype,
        "compile": pair.compile,
        "draft_nodes": pair.draft_nodes,
        "draft_window": pair.draft_window,
        "links": [link.as_dict() for link in plan.links],
        "transport": plan.transport,
        "prompts": len(plan.prompts),
        "rounds": plan.rounds,
        "max_tokens": plan.max_tokens,
        "seed": plan.seed,
        "clients": plan.clients,
        "notes": notes,
    }
    new = folder / "results.json.new"
    write_json({"settings": settings} | as_dict(results), new)
    return new.replace(folder / "results.json")
