"""JSON schemas as llguidance is to read them: values written in one way, objects closed, names that follow a schema.

https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md says what it keeps; the rest it refuses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]

_STRICT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": False, "coerce_one_of": False}
_LENIENT = _STRICT | {"lenient": True, "coerce_one_of": True}

_APPLIED = ("$ref", "anyOf", "oneOf", "allOf")
_NAMED = ("properties", "patternProperties")
_OTHERS = ("additionalProperties", "unevaluatedProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")

_ASKING = (*_NAMED, *_OTHERS, *_BOUNDS, "multipleOf", "minProperties")
"""What is followed otherwise where it stands beside other schemas."""

_MAPS = (*_NAMED, "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_VALUES = ("const", "enum", "default", "examples", "example")
"""What holds no schemas. Any other object may: a reference leads to wherever it wants."""

LONGEST_PATTERN = 2**11
"""Characters of a regular expression: one of so many options takes 20 ms to compile, and eight times as many take a second."""

ALL_PATTERNS = 2**13
"""Characters of a schema's patterns together, each counted once."""

MOST_COMBINED = 2**13
"""Schemas that others are combined of, each counted wherever a reference leads to it: what is combined is written out."""

_EXACT = 2**53
"""Up to here llguidance reads whole numbers as they are, as it does so by floating point."""

_ALL_BUT = re.compile(r"((?<!\\)(?:\\\\)*\[\^)(?!\])")


def prepared(schema: Any, *, lenient: bool = False) -> Schema:
    """``schema`` for llguidance: its values are written as json.dumps writes them.

    An object has no properties but those that its schema names, unless that speaks of others; where schemas are combined anywhere,
    all objects are as open as JSON Schema has them. If ``lenient``, what cannot be kept is passed over. Raises ValueError for what
    is no schema, or cannot be kept although llguidance would take it.
    """
    if not isinstance(schema, dict | bool):
        raise ValueError("# is no schema: it must be an object")
    if schema in (False, {"not": {}}):
        raise ValueError("no value fits this schema")
    root: Schema = schema if isinstance(schema, dict) else {}
    places = list(_places(root, "#"))
    combined = [each for each, _ in places if _combines(each)]
    _check_patterns([each for each, _ in places])
    _check_combined(combined, root)
    if combined and sum("multipleOf" in each for each, _ in places) > 1:
        raise ValueError("'multipleOf' is supported once where schemas are combined")  # its states are all multiples' product

    def made(each: Schema) -> Schema:
        # Of older drafts llguidance would pass over what these did not know.
        each = _with_quotes_kept_out(_named_by({key: value for key, value in each.items() if key != "$schema"}, root))
        if not combined and any(name in each for name in _NAMED) and not any(name in each for name in _OTHERS):
            each = each | {"additionalProperties": False}
        if not lenient and (problem := _problem(each, bool(combined))) is not None:
            raise ValueError(problem)
        return each

    changed: Schema = _changed(root, made)
    return changed | {"x-guidance": _LENIENT if lenient else _STRICT}


def place_of(schema: Any, problem: str) -> str:
    """Where in a schema stands what llguidance says of it, as far as its words tell: " (at #/…)" or nothing."""
    words = set(re.findall(r"[\w$]+", problem)) | ({"minProperties", "maxProperties"} if "min/maxProperties" in problem else set())
    places = [place for each, place in _places(schema, "#") if not words.isdisjoint(each)] if isinstance(schema, dict) else []
    return f" (at {places[0]})" if len(places) == 1 else ""


def _named_by(schema: Schema, root: Schema) -> Schema:
    """What ``propertyNames`` asks for by properties and patterns, which llguidance knows."""
    names = schema.get("propertyNames")
    names = _target(names, root) if isinstance(names, dict) and names.keys() == {"$ref"} else names
    if not isinstance(names, dict) or any(each in schema for each in _NAMED) or names.get("type", "string") != "string":
        return schema
    rest = {key: value for key, value in schema.items() if key not in ("propertyNames", *_OTHERS)}
    value = next((schema[each] for each in _OTHERS if each in schema), True)
    match {key: names[key] for key in names if key not in ("type", "title", "description")}:
        case {"enum": [*listed], **others} if not others and all(isinstance(each, str) for each in listed):
            return rest | {"properties": {each: value for each in listed}, "additionalProperties": False}
        case {"pattern": str(pattern), **others} if not others:
            return rest | {"patternProperties": {pattern: value}, "additionalProperties": False}
        case {**lengths} if lengths and lengths.keys() <= {"minLength", "maxLength"}:
            pattern = f"^(?s:.){{{lengths.get('minLength', 0)},{lengths.get('maxLength', '')}}}$"
            return rest | {"patternProperties": {pattern: value}, "additionalProperties": False}
    return schema


def _with_quotes_kept_out(schema: Schema) -> Schema:
    """The same with one control character less in all that is told by what it is not, such as ``[^"]``.

    llguidance writes what has all control characters by any escape, also that of a quote or a backslash, if these are not in it.
    """
    made = dict(schema)
    if isinstance(pattern := schema.get("pattern"), str):
        made["pattern"] = _ALL_BUT.sub(r"\1\\x1f", pattern)
    if isinstance(names := schema.get("patternProperties"), dict):
        made["patternProperties"] = {_ALL_BUT.sub(r"\1\\x1f", name): each for name, each in names.items()}
    return made


def _problem(schema: Schema, combined: bool) -> str | None:
    """Why llguidance would let through what this schema excludes; None if it would not."""
    least, required = schema.get("minProperties"), schema.get("required")
    is_open = combined or "patternProperties" in schema or schema.get("additionalProperties") is not False
    # A name that is open may be written twice, and then counts once.
    if is_open and isinstance(least, int) and least > max(1, len(set(map(str, required))) if isinstance(required, list) else 0):
        return (
            "'minProperties' above 1 and the number of 'required' names is not supported where names are open: "
            "name the properties, or leave it out"
        )
    if "additionalItems" in schema:
        return "'additionalItems' is not supported: 'items' beside 'prefixItems' says the same"
    bounds = {each: value for each in _BOUNDS if isinstance(value := schema.get(each), int | float)}
    lower = [bounds[each] for each in ("minimum", "exclusiveMinimum") if each in bounds]
    upper = [bounds[each] for each in ("maximum", "exclusiveMaximum") if each in bounds]
    if ("exclusiveMinimum" in bounds or "exclusiveMaximum" in bounds) and lower and upper and min(upper) - max(lower) < 1:
        return "'exclusiveMinimum' and 'exclusiveMaximum' are not supported where less than 1 lies between the bounds"
    if combined and {"exclusiveMinimum", "exclusiveMaximum"} & bounds.keys() and schema.get("type") != "integer":
        return "'exclusiveMinimum' and 'exclusiveMaximum' are supported for integers only where schemas are combined"
    if any(abs(each) > _EXACT for each in (*bounds.values(), *_whole_numbers([schema.get("const"), schema.get("enum")]))):
        return f"whole numbers beyond {_EXACT} are not supported"
    if isinstance(step := schema.get("multipleOf"), int | float) and step >= 2**15:
        return f"'multipleOf' is supported up to {2**15 - 1}"
    return None


def _whole_numbers(value: Any) -> Iterator[int]:
    """All that are in a JSON value."""
    if isinstance(value, int):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _whole_numbers(each)


def _combines(schema: Schema) -> bool:
    """Whether several schemas speak of one value, so that each is to leave room for the others' properties."""
    every = schema.get("allOf")
    applied = [each for each in _APPLIED if each in schema]
    asked = any(each in schema for each in _ASKING)
    return (isinstance(every, list) and len(every) > 1) or len(applied) > 1 or bool(applied and asked)


def _check_patterns(schemas: Sequence[Schema]) -> None:
    patterns: set[str] = set()
    for each in schemas:
        names = each.get("patternProperties")
        some = {each.get("pattern"), *(names if isinstance(names, dict) else ())}
        patterns |= {pattern for pattern in some if isinstance(pattern, str)}
    if (longest := max(map(len, patterns), default=0)) > LONGEST_PATTERN:
        raise ValueError(f"a pattern has {longest} characters, and at most {LONGEST_PATTERN} are compiled")
    if (total := sum(map(len, patterns))) > ALL_PATTERNS:
        raise ValueError(f"its patterns have {total} characters, and at most {ALL_PATTERNS} are compiled")


def _check_combined(combined: Sequence[Schema], root: Schema) -> None:
    """References that lead to references, twice each, make of a short schema one that is a million times as large."""
    left = MOST_COMBINED

    def look(schema: Any, seen: tuple[str, ...]) -> None:
        nonlocal left
        for each, _ in _places(schema, "#"):
            left -= 1
            if left < 0:
                raise ValueError(f"more than {MOST_COMBINED} schemas are combined by 'allOf', or beside '$ref', 'anyOf' or 'oneOf'")
            reference = each.get("$ref")
            if isinstance(reference, str) and reference not in seen:
                look(_target({"$ref": reference}, root), (*seen, reference))

    for schema in combined:
        look({key: value for key, value in schema.items() if key not in ("$defs", "definitions")}, ())


def _changed(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """``schema`` with all that are in it changed, the innermost first."""
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            made[keyword] = {name: _changed(each, change) for name, each in value.items()}
        elif keyword in _LISTS and isinstance(value, list):
            made[keyword] = [_changed(each, change) for each in value]
        elif keyword not in _VALUES:
            made[keyword] = _changed(value, change)
    return change(made)


def _places(schema: Any, place: str) -> Iterator[tuple[Schema, str]]:
    """Every schema in this one, and where it stands."""
    if not isinstance(schema, dict):
        return
    yield schema, place
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            for name, each in value.items():
                yield from _places(each, f"{place}/{keyword}/{name}")
        elif keyword in _LISTS and isinstance(value, list):
            for number, each in enumerate(value):
                yield from _places(each, f"{place}/{keyword}/{number}")
        elif keyword not in _VALUES:
            yield from _places(value, f"{place}/{keyword}")


def _target(schema: Any, root: Schema) -> Any:
    """What a reference within the document leads to."""
    for _ in range(64):  # a circle of references leads nowhere
        if not (isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str) and reference.startswith("#")):
            return schema
        schema = root
        for step in reference.removeprefix("#").split("/")[1:]:
            schema = schema.get(step) if isinstance(schema, dict) else None
    return None
