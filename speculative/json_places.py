"""The schemas within a JSON schema: where each stands, and what references lead to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias
from urllib.parse import unquote

Schema: TypeAlias = dict[str, Any]

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values hold schemas by names."""

_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_VALUES = ("const", "enum", "default", "examples", "example")
"""What holds no schemas. Any other object may: a reference leads to wherever it wants."""


def places(schema: Any, place: str = "#") -> Iterator[tuple[Schema, str]]:
    """Every schema in this one that is an object, and where it stands."""
    if not isinstance(schema, dict):
        return
    yield schema, place
    for keyword, value in schema.items():
        if keyword in MAPS and isinstance(value, dict):
            for name, each in value.items():
                yield from places(each, f"{place}/{keyword}/{name}")
        elif keyword in _LISTS and isinstance(value, list):
            for number, each in enumerate(value):
                yield from places(each, f"{place}/{keyword}/{number}")
        elif keyword not in _VALUES:
            yield from places(value, f"{place}/{keyword}")


def changed(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """``schema`` with all that are in it changed, the innermost first."""
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for keyword, value in schema.items():
        if keyword in MAPS and isinstance(value, dict):
            made[keyword] = {name: changed(each, change) for name, each in value.items()}
        elif keyword in _LISTS and isinstance(value, list):
            made[keyword] = [changed(each, change) for each in value]
        elif keyword not in _VALUES:
            made[keyword] = changed(value, change)
    return change(made)


def target(reference: Any, root: Schema) -> Any:
    """What a reference leads to; None where that is nothing in this document."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found: Any = root
    for step in unquote(reference).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found
