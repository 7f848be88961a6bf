"""Results of `moaserve bench peers` as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import printing
from benchmarks.machine import provenance, write_json
from benchmarks.peers.figures import Figures, Key, best_assistance, figures
from benchmarks.peers.measuring import Results
from benchmarks.peers.ways import OURS


def print_results(results: Results, settings: Mapping[str, Any], notes: Sequence[str]) -> None:
    """A table for each number of prompts at once, and what else is to be said."""
    console = printing.console()
    found = figures(results)
    for at_once in dict.fromkeys(number for number, _ in found):
        columns = ("", "tokens/s", "ours over it (median, quartiles)", "same text as ours")
        table = printing.table(f"{_title(settings)}, {at_once} at once", columns)
        table.columns[0].no_wrap = True
        for (number, name), each in found.items():
            if number == at_once:
                table.add_row(name, f"{each.tokens_per_second:.1f}", ratio(each, name), f"{each.identical} of {each.texts}")
        console.print(table)
        if (best := best_assistance(found, at_once)) is not None:
            console.print(f"transformers' best way with drafts is {best}: ours over it {ratio(found[at_once, best], best)}")
    for line in [*notes, *idle(results), *(f"Failed: {failure}" for failure in results.failures)]:
        console.print(line, highlight=False)
    console.print(provenance().line(), highlight=False)


def ratio(each: Figures, name: str) -> str:
    """Our speed over a way's, in words."""
    if name == OURS or each.ours_over is None:
        return "–"
    over = each.ours_over
    return f"{over['median']:.2f}x ({over['p25']:.2f}–{over['p75']:.2f})"


def idle(results: Results) -> list[str]:
    """How much the servers that were not asked got in the way of others."""
    return [f"Servers that waited used {results.idle_cpu / results.busy:.1%} of a core together."] if results.busy else []


def write(results: Results, settings: Mapping[str, Any], notes: Sequence[str], folder: Path) -> list[Path]:
    """`results.json` and a picture; raises ImportError, the figures being written, without matplotlib."""
    path = folder / "results.json"
    write_json(as_dict(results, settings, notes), path)
    from benchmarks.peers.drawing import draw

    return [path, draw(figures(results), folder / "peers.png", title=_title(settings))]


def as_dict(results: Results, settings: Mapping[str, Any], notes: Sequence[str]) -> dict[str, Any]:
    """For JSON: figures and every group's tokens and seconds; no text."""
    found = figures(results)
    return {
        "settings": dict(settings),
        "notes": list(notes),
        "failures": results.failures,
        "idle_cores": round(results.idle_cpu / results.busy, 4) if results.busy else None,
        "best_assistance": {number: best_assistance(found, number) for number in dict.fromkeys(number for number, _ in found)},
        "figures": [_figures(key, each) for key, each in found.items()],
        "runs": [
            {"concurrency": at_once, "way": name, "group": number, "tokens": run.tokens, "seconds": round(run.seconds, 6)}
            for (at_once, name), runs in results.runs.items()
            for number, run in runs.items()
        ],
    }


def _figures(key: Key, each: Figures) -> dict[str, Any]:
    return {"concurrency": key[0], "way": key[1]} | asdict(each) | {"tokens_per_second": round(each.tokens_per_second, 2)}


def _title(settings: Mapping[str, Any]) -> str:
    threads = "1 thread" if settings["threads"] == 1 else f"{settings['threads']} threads"
    return f"{settings['model']}, {settings['dtype']}, {threads}, {settings['num_prompts']} prompts, greedy"
