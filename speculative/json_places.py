"""The schemas within a JSON schema: where each stands, and what references lead to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any, TypeAlias
from urllib.parse import quote, unquote

Schema: TypeAlias = dict[str, Any]

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_VALUES = ("const", "enum", "default", "examples", "example")
"""What holds no schemas. Any other object may: a reference leads to wherever it wants."""


def places(schema: Any, place: str = "#") -> Iterator[tuple[Schema, str]]:
    """Every schema in this one that is an object, and where it stands."""
    if isinstance(schema, dict):
        yield schema, place
        for steps, each in _inner(schema):
            yield from places(each, "/".join((place, *map(str, steps))))


def changed(schema: Any, change: Callable[[Schema, Schema], Schema]) -> Any:
    """``schema`` with all that are in it changed, the innermost first; ``change`` is given each with these, and as it was."""
    if not isinstance(schema, dict):
        return schema
    made = {keyword: copy(value) for keyword, value in schema.items()}
    for (keyword, *within), each in _inner(schema):
        if within:
            made[keyword][within[0]] = changed(each, change)
        else:
            made[keyword] = changed(each, change)
    return change(made, schema)


def _inner(schema: Schema) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What may be a schema directly within this one, and the keyword and the name or number by which it is found."""
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            yield from (((keyword, name), each) for name, each in value.items())
        elif keyword in _LISTS and isinstance(value, list):
            yield from (((keyword, number), each) for number, each in enumerate(value))
        elif keyword not in _VALUES:
            yield (keyword,), value


def target(reference: Any, root: Schema) -> Any:
    """What a reference leads to; None where that is nothing in this document."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found: Any = root
    for step in unquote(reference).split("/")[1:]:
        found = _next(found, step)
    return found


def moved(reference: str, root: Schema, keyword: str, to: str) -> str:
    """The same reference where all lists by ``keyword`` are found by ``to`` in their schemas."""
    if f"/{keyword}/" not in reference:
        return reference
    found, steps = root, ["#"]
    for step in unquote(reference).split("/")[1:]:
        found = _next(found, step)
        steps.append(to if step == keyword and isinstance(found, list) else quote(step, safe="~"))
    return "/".join(steps)


def _next(found: Any, step: str) -> Any:
    """What one step of a reference leads to from there; None where that is nothing."""
    name = step.replace("~1", "/").replace("~0", "~")
    if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
        return found[int(name)]
    return found.get(name) if isinstance(found, dict) else None
