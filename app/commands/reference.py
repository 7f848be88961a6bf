"""docs/configuration.md, of settings and options of `moaserve serve` and `edge`: `python -m app.commands.reference > FILE`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from app.cluster_settings import ClusterSettings
from app.commands.edge import edge
from app.commands.ray import ray
from app.commands.serve import serve
from app.edge_settings import EdgeSettings
from app.settings import ENV_PREFIX, HttpSettings, Settings

INTRODUCTION = """# Configuration

<!-- Written by `make docs`, from app/settings.py and the options of `moaserve serve`. Change those, not this page. -->

Every setting is an option of `moaserve serve`, an environment variable, and a key of the TOML file that `--config` names. Where
several say something, the option counts, then the variable, then the file. A variable that begins with `MOASERVE_` and a key that
name no setting are refused, and so are values out of range. Several values are written in one text, with commas.

```toml
# moaserve.toml, for moaserve serve --config moaserve.toml
model = "Qwen/Qwen2.5-0.5B-Instruct"
drafter = "ngram"
max_num_seqs = 8
request_timeout = 60.0
```

[usage.md](usage.md) says more about some of them: keys and limits, models and drafters, compilation.
"""
EDGE = """## moaserve edge

`moaserve edge` ([edge.md](edge.md)) takes what is above under Server, Who may ask, Stored responses and Metrics, and of Sessions
what is about Redis, and no other of these settings. Its own:
"""
RAY = """## moaserve ray

`moaserve ray` ([ray.md](ray.md)) takes all settings of `moaserve serve`, the engine's for each replica, and these:
"""
FIRST_PANEL = "Server"
HEADER = "| option | variable | key | values | default | meaning |\n|---|---|---|---|---|---|\n"
_DEFAULT = re.compile(r"\s*\(default: (?P<words>.*)\)$", re.DOTALL)


def configuration() -> str:
    """The page as Markdown: a table for each panel of `moaserve serve --help`, then what edges and replicas have besides."""
    tables = _tables(serve, Settings, "##")
    own = _tables(edge, EdgeSettings, "###", shared=HttpSettings)
    of_replicas = _tables(ray, ClusterSettings, "###", shared=Settings)
    return "\n".join((INTRODUCTION, *tables, EDGE, *own, RAY, *of_replicas))


def _tables(
    command: Callable[..., None], settings: type[HttpSettings], heading: str, shared: type[HttpSettings] | None = None
) -> Iterator[str]:
    """A table for each panel, without settings that are as in ``shared``."""
    app = typer.Typer(add_completion=False)
    app.command()(command)
    panels: dict[str, list[str]] = {}
    for option in typer.main.get_command(app).params:
        field = settings.model_fields.get(str(option.name))
        known = None if shared is None else shared.model_fields.get(str(option.name))
        if field is not None and (known is None or known.default != field.default):
            panels.setdefault(getattr(option, "rich_help_panel", None) or FIRST_PANEL, []).append(_row(option, field))
    yield from (f"{heading} {panel}\n\n{HEADER}{''.join(rows)}" for panel, rows in panels.items())


def _row(option: Any, field: FieldInfo) -> str:
    """The line of an option (click's), which sets the field of its name."""
    meaning, words = split_default(option.help or "")
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    key = f"`{option.name}`" if option.name != "config" else ""
    cells = (names, f"`{ENV_PREFIX}{option.name.upper()}`", key, _values(field), _default(field.default, words), _escaped(meaning))
    return f"| {' | '.join(cells)} |\n"


def split_default(help: str) -> tuple[str, str | None]:
    """A help text without what it says of the default at its end, and that."""
    found = _DEFAULT.search(help)
    return (help[: found.start()], found["words"]) if found else (help, None)


def as_written(value: Any) -> str:
    """A value as it is given to an option."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _default(value: Any, words: str | None) -> str:
    """The default as one writes it, and the words that the help text has for it."""
    if value is None or value == "" or value is PydanticUndefined:
        return _escaped(words or "")
    written = as_written(value)
    rest = (words or "").removeprefix(written).lstrip(":, ")
    return f"`{written}`" + (f" ({_escaped(rest)})" if rest else "")


def _values(field: FieldInfo) -> str:
    """What may be set, in words."""
    return " or ".join(_kind(kind, field) for kind in _members(field.annotation))


def _members(annotation: Any) -> Iterator[Any]:
    """The types of a union, None left out."""
    members = get_args(annotation)
    if not members or get_origin(annotation) is Literal:
        yield annotation
        return
    yield from (member for member in members if member is not NoneType)


def _kind(kind: Any, field: FieldInfo) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if kind is bool:
        return "`true`, `false`"
    if kind in (int, float):
        return f"{'whole number' if kind is int else 'number'}{_range(field)}"
    return "path" if kind is Path else "text"


def _range(field: FieldInfo) -> str:
    bounds = {name: getattr(rule, name) for rule in field.metadata for name in ("ge", "gt", "le", "lt") if hasattr(rule, name)}
    if "ge" in bounds and "le" in bounds:
        return f", {bounds['ge']} to {bounds['le']}"
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return "".join(f" {signs[name]} {bound}" for name, bound in bounds.items())


def _escaped(text: str) -> str:
    """Text for a cell of a table: what Markdown would take for more is not."""
    return re.sub(r"([|*<])", r"\\\1", " ".join(text.split()))


if __name__ == "__main__":
    print(configuration(), end="")
