"""Writes README.md's table: each metric, its type and meaning as the code has them, and the panels that show it.

Run it after changing a metric or a dashboard: PYTHONPATH=. .venv/bin/python grafana/table.py
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from app.metric_names import PREFIX
from app.metrics import Metrics
from speculative.config import EdgeStatus, EngineStatus, ModelInfo

FOLDER: Final = Path(__file__).parent
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->"


def main() -> None:
    """Replace the table."""
    readme = FOLDER / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    readme.write_text(f"{before}{BEGIN}{table()}{END}{after}", encoding="utf-8")


def table() -> str:
    """The table, in Markdown."""
    shown = panels()
    lines = ["| metric | type | meaning | panels |", "|---|---|---|---|"]
    for name, (kind, meaning) in metrics().items():
        where = "; ".join(f"{title}: {', '.join(found)}" for title, found in shown.get(name, {}).items())
        lines.append(f"| `{name}` | {kind} | {meaning} | {where} |")
    return "\n".join(lines) + "\n"


def metrics() -> dict[str, tuple[str, str]]:
    """Type and meaning of each metric, in order of their names; those of the process and of Python differ by platform."""
    told = Metrics()
    told.watch(_Engine(), lambda: "model")
    told.store_observer(lambda: "model").reachable(True)
    told.remote_observer(lambda: "model")
    asyncio.run(told.exposition(""))
    families = (family for family in told.registry.collect() if family.name.startswith(PREFIX))
    return dict(sorted((family.name, (family.type, family.documentation)) for family in families))


def panels() -> dict[str, dict[str, list[str]]]:
    """For each metric, the titles of dashboards, and of their panels that show it."""
    known = metrics()
    shown: dict[str, dict[str, list[str]]] = {}
    for dashboard in dashboards():
        for panel, expression in queries(dashboard):
            for name in metrics_of(expression, known):
                titles = shown.setdefault(name, {}).setdefault(dashboard["title"].removeprefix("MoA Serve / "), [])
                if panel["title"] not in titles:
                    titles.append(panel["title"])
    return shown


def dashboards() -> list[dict[str, Any]]:
    """All of them, in order of their files' names."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((FOLDER / "dashboards").glob("*.json"))]


def queries(dashboard: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """A dashboard's panels with each of their queries."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel, target["expr"]


def metrics_of(expression: str, known: dict[str, tuple[str, str]]) -> list[str]:
    """Ours that a query reads, without the endings of their series; raises KeyError for one that nobody tells."""
    names = []
    for series in re.findall(rf"\b{PREFIX}\w+", expression):
        candidates = (series, *(series.removesuffix(end) for end in ("_total", "_bucket", "_sum", "_count")))
        name = next((each for each in candidates if each in known), None)
        if name is None:
            raise KeyError(f"{series} is no metric of this server")
        names.append(name)
    return names


class _Engine:
    ready = alive = True
    busy_seconds = 0.0
    info = ModelInfo("model", 1, 1, "float32", "cpu", "none", {}, 0)

    def status(self) -> EngineStatus:
        return EngineStatus(0, 0, 0.0, edge=EdgeStatus(True, False, 0.0, 0, 0, 0, 0, 0))


if __name__ == "__main__":
    main()
