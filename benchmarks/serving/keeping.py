"""Results as a file: figures to read, and every request without its text, so that another measurement can be put beside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.machine import provenance
from benchmarks.serving.client import Outcome
from benchmarks.serving.figures import Asked, Figures, Row, baseline, figures
from benchmarks.serving.measuring import Plan, Results, Run
from benchmarks.serving.slo import Slo
from benchmarks.serving.ways import OFF, Own

NAME = "results.json"
_KEPT = ("late", "first", "end", "tokens", "prompt_tokens", "cached_tokens", "drafts", "accepted", "passes", "text", "error")


class CompareError(Exception):
    """A file of results cannot be put beside this measurement; the message says why."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Another measurement: its figures, under names of their own, and what became of its plainly decoded requests."""

    name: str
    settings: dict[str, Any]
    rates: Sequence[float]
    slo: Slo | None
    rows: Sequence[Row]
    plain: dict[Asked, Outcome]


def settings(plan: Plan, results: Results) -> dict[str, Any]:
    """What everything was measured with; ``asked`` are those that two measurements share if they asked the same."""
    workload, own = plan.workload, plan.host
    asked = {
        "rates": list(results.rates),
        "rounds": plan.rounds,
        "prompts": len(workload.prompts),
        "seconds": workload.seconds,
        "fewest": workload.fewest,
        "warm_up": workload.warm_up,
        "max_tokens": workload.max_tokens,
        "fixed_tokens": workload.fixed_tokens,
        "seed": workload.seed,
        "parameters": plan.body,
        "digest": workload.digest(results.rates, plan.rounds),
    }
    if isinstance(own, Own):
        server: dict[str, Any] = {
            "form": "tokens",
            "options": list(own.options),
            "draft_options": list(own.draft_options),
            "chain": own.chain,
        }
    else:
        server = {"form": own.form, "base_url": own.base_url, "name": own.name, "body": own.body}
    cores = {"server": sorted(plan.server_cores or ()), "client": sorted(plan.client_cores or ())}
    return {"asked": asked, "server": server, "ways": list(plan.ways), "timeout": plan.timeout, "cores": cores}


def rows(results: Results, plain: dict[Asked, Outcome] | None = None) -> list[Row]:
    """Figures of all that was measured, beside its own plain decoding, or beside ``plain`` where it has none."""
    return figures(results.runs, results.slo, baseline(results.runs) or plain or {})


def write(results: Results, plan: Plan, compared: Kept | None, notes: Sequence[str], folder: Path) -> Path:
    """results.json; what was there is replaced at once, so that there always is a whole one."""
    found = rows(results, compared.plain if compared else None)
    head = {
        "provenance": provenance().as_dict(),
        "settings": settings(plan, results),
        "compared_with": compared.name if compared else None,
        "capacity": asdict(results.capacity) if results.capacity else None,
        "alone": asdict(results.alone) if results.alone else None,
        "slo": asdict(results.slo) if results.slo else None,
        "notes": list(notes),
        "failures": results.failures,
        "figures": [asdict(row) for row in found],
    }
    runs = ",\n".join("  " + json.dumps(_rounded(_run(run)), separators=(",", ":")) for run in results.runs)
    text = json.dumps(_rounded(head), indent=1).removesuffix("\n}") + f',\n "runs": [\n{runs}\n ]\n}}\n'
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{NAME}.new"
    new.write_text(text, encoding="utf-8")
    return new.replace(folder / NAME)


def _run(run: Run) -> dict[str, Any]:
    """A line of the file: requests in the order in which they were due, ``at`` in seconds from the load's beginning."""
    who = {"way": run.way, "rate": run.rate, "round": run.round, "seconds": run.seconds, "wall": run.wall}
    requests = {
        "at": [arrival.at for arrival in run.arrivals],
        "prompt": [arrival.prompt for arrival in run.arrivals],
        "max_tokens": [arrival.max_tokens for arrival in run.arrivals],
        **{name: [getattr(outcome, name) for outcome in run.outcomes] for name in _KEPT},
    }
    return who | {"client_share": run.client_share, "cost": asdict(run.cost), "requests": requests}


def read(path: Path) -> Kept:
    """A file that ``write`` has written, or the folder that it is in; raises CompareError."""
    file = path / NAME if path.is_dir() else path
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        name = file.parent.name if file.name == NAME else file.stem
        found = [
            Row(f"{row['way']} ({name})", row["rate"], row["round"], msgspec.convert(row["figures"], Figures))
            for row in told["figures"]
        ]
        return Kept(
            name=name,
            settings=told["settings"],
            rates=told["settings"]["asked"]["rates"],
            slo=Slo(**told["slo"]) if told["slo"] else None,
            rows=found,
            plain={
                (run["rate"], run["round"], number): outcome
                for run in told["runs"]
                if run["way"] == OFF
                for number, outcome in enumerate(_outcomes(run["requests"]))
                if outcome.error is None
            },
        )
    except OSError as error:
        raise CompareError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CompareError(f"{file} holds no results of bench serving ({error!r})") from error


def _outcomes(requests: dict[str, list[Any]]) -> list[Outcome]:
    return [Outcome(**dict(zip(_KEPT, values, strict=True))) for values in zip(*(requests[name] for name in _KEPT), strict=True)]


def check_same_requests(kept: Kept, plan: Plan) -> None:
    """Raise CompareError unless ``plan``, whose rates are the kept ones, asks what the kept measurement has asked."""
    mine = settings(plan, Results(rates=kept.rates))
    theirs = kept.settings
    if (mine["server"]["form"] == "chat") != (theirs["server"]["form"] == "chat"):
        raise CompareError(f"it was asked as {theirs['server']['form']}, this would be as {mine['server']['form']}: see --ask")
    different = [name for name, value in mine["asked"].items() if value != theirs["asked"].get(name)]
    if different:
        pairs = (f"{name} {mine['asked'][name]!r} here, {theirs['asked'].get(name)!r} there" for name in different)
        raise CompareError("it did not ask the same: " + "; ".join(pairs))


def _rounded(value: Any) -> Any:
    """Six significant digits are more than any of this has."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
