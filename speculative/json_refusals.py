"""JSON schemas that llguidance would take, and read otherwise than JSON Schema says or not be done with in time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence, Set
from typing import Any

from speculative.json_places import Schema, places, target

LONGEST_PATTERN = 2**11
"""Characters of a regular expression: one of so many options takes 20 ms to compile, and eight times as many take a second."""

ALL_PATTERNS = 2**13
"""Characters of a schema's patterns together, each counted once."""

MOST_NAMES = 2**6
"""Patterns of an object's names: each is compared with every other, and 200 take a second."""

MOST_COMBINED = 2**10
"""Schemas that others are combined of, each counted wherever a reference leads to it: what is combined is written out."""

PATTERNS_COMBINED = 2**4
"""Patterns among these: of twenty that hold together the states took 3 s."""

_FORMS = frozenset({"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
"""Formats of strings that llguidance keeps."""

_UNWRITTEN_FORMS = frozenset(
    {
        *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template"),
        *("json-pointer", "relative-json-pointer", "regex"),
    }
)
"""Others that JSON Schema has. Any further are the user's own, and ask nothing."""

_EXACT = 2**53
"""From here on llguidance reads other whole numbers than are written, as it does so by floating point."""

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_APPLIED = ("$ref", "anyOf", "oneOf", "allOf")
ASKING = frozenset(
    {
        *("type", "enum", "const", "pattern", "format", "minLength", "maxLength", "multipleOf", *_BOUNDS),
        *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames", "required"),
        *("minProperties", "maxProperties", "items", "prefixItems", "unevaluatedItems", "minItems", "maxItems"),
    }
)
"""Keywords that ask something of a value."""

_OTHERWISE = re.compile(r"\(\?[a-zA-Z]|\[\[|\[\^?\]|(?<!\\)(?:\\\\)*\\(?:[aAzZP]|p\{?C|x00|x\{0|u0000)")
"""Flags, brackets and escapes that mean something else in Rust; and control characters, with which it would let quotes through."""


def combines(schema: Schema, asking: Set[str] = ASKING) -> bool:
    """Whether several schemas speak of one value: others that are named here, or this one, by keywords that are ``asking``, too."""
    every, applied = schema.get("allOf"), [each for each in _APPLIED if each in schema]
    return (isinstance(every, list) and len(every) > 1) or len(applied) > 1 or bool(applied and not asking.isdisjoint(schema))


def overlaps(schema: Schema) -> bool:
    """Whether several schemas speak of one value, be it one that is named and fits a pattern of names."""
    return combines(schema) or {"properties", "patternProperties"} <= schema.keys()


def costly(root: Schema, schemas: Sequence[Schema]) -> str | None:
    """What in a schema would take too long; None if nothing does. ``schemas`` are all that are in it."""
    patterns = {each for schema in schemas for each in _patterns(schema)}
    if (longest := max(map(len, patterns), default=0)) > LONGEST_PATTERN:
        return f"a pattern has {longest} characters, and at most {LONGEST_PATTERN} are compiled"
    if (total := sum(map(len, patterns))) > ALL_PATTERNS:
        return f"its patterns have {total} characters, and at most {ALL_PATTERNS} are compiled"
    names = [each["patternProperties"] for each in schemas if isinstance(each.get("patternProperties"), dict)]
    if (most := max(map(len, names), default=0)) > MOST_NAMES:
        return f"'patternProperties' has {most} patterns, and at most {MOST_NAMES} are compiled"
    steps = [step for each in schemas if isinstance(step := each.get("multipleOf"), int | float)]
    if max(steps, default=0) >= 2**15 or sum(step > 100 for step in steps) > 1:
        return f"'multipleOf' is supported up to {2**15 - 1}, and above 100 once"
    return _combined(root, [each for each in schemas if overlaps(each)], steps)


def _combined(root: Schema, schemas: Sequence[Schema], steps: Sequence[float]) -> str | None:
    """What is too much where schemas are combined. References that lead to references, twice each, double with every level."""
    if schemas and len(steps) > 1:
        return "'multipleOf' is supported once where schemas are combined"
    for schema in schemas:
        here = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
        num_patterns = 0
        for number, each in enumerate(_written_out(here, root, ())):
            num_patterns += len(list(_patterns(each)))
            if number >= MOST_COMBINED or num_patterns > PATTERNS_COMBINED:
                return (
                    f"more than {MOST_COMBINED} schemas or {PATTERNS_COMBINED} patterns are combined "
                    "by 'allOf', or beside '$ref', 'anyOf' or 'oneOf'"
                )
    return None


def _written_out(schema: Schema, root: Schema, seen: tuple[str, ...]) -> Iterator[Schema]:
    for each, _ in places(schema):
        yield each
        if (reference := each.get("$ref")) not in seen and isinstance(found := target(reference, root), dict):
            yield from _written_out(found, root, (*seen, str(reference)))


def _patterns(schema: Schema) -> Iterator[str]:
    names = schema.get("patternProperties")
    for each in (schema.get("pattern"), *(names if isinstance(names, dict) else ())):
        if isinstance(each, str):
            yield each


def is_remark(form: Any) -> bool:
    """Whether a string's format is none of JSON Schema's own, and asks nothing."""
    return isinstance(form, str) and form not in _FORMS | _UNWRITTEN_FORMS


def unwritten_form(schema: Schema) -> str | None:
    """What asks for a string's format that llguidance does not know, though JSON Schema does; None if nothing does."""
    types, form = schema.get("type", "string"), schema.get("format")
    if isinstance(form, str) and form in _UNWRITTEN_FORMS and "string" in (types if isinstance(types, list) else [types]):
        return f"the format {form!r} is not supported: leave it out, or say it by 'pattern'"
    return None


def read_otherwise(schema: Schema, overlapping: bool) -> str | None:
    """Why a value might be let through that this schema excludes; None if none can.

    Where schemas are ``overlapping``, others may speak of the value too.
    """
    least, required = schema.get("minProperties"), schema.get("required")
    is_open = overlapping or "patternProperties" in schema or schema.get("additionalProperties") is not False
    # A name that is open may be written twice, and then counts once.
    if is_open and isinstance(least, int) and least > max(1, len(set(map(str, required))) if isinstance(required, list) else 0):
        return (
            "'minProperties' above 1 and the number of 'required' names is not supported where names are open: "
            "name the properties, or leave it out"
        )
    if "additionalItems" in schema or isinstance(schema.get("items"), list):
        return "'additionalItems', or 'items' that are a list, are not supported: 'prefixItems' and 'items' say the same"
    for pattern in _patterns(schema):
        if found := _OTHERWISE.search(pattern):
            return f"the pattern {pattern!r} is not supported: leave {found[0]!r} out"
    if any(re.search(r"\\u00[01]|\\u007f", json.dumps(each)) for each in (schema.get("const"), schema.get("enum"))):
        return "'const' and 'enum' with control characters are not supported"
    return _numbers(schema, overlapping)


def _numbers(schema: Schema, overlapping: bool) -> str | None:
    bounds = {each: value for each in _BOUNDS if isinstance(value := schema.get(each), int | float)}
    lower = [bounds[each] for each in ("minimum", "exclusiveMinimum") if each in bounds]
    upper = [bounds[each] for each in ("maximum", "exclusiveMaximum") if each in bounds]
    if ("exclusiveMinimum" in bounds or "exclusiveMaximum" in bounds) and schema.get("type") != "integer":
        if overlapping:
            return "'exclusiveMinimum' and 'exclusiveMaximum' are supported for integers only where schemas are combined"
        if lower and upper and min(upper) - max(lower) < 1:
            return "'exclusiveMinimum' and 'exclusiveMaximum' are not supported where less than 1 lies between the bounds"
    if any(abs(each) >= _EXACT for each in (*bounds.values(), *_whole_numbers([schema.get("const"), schema.get("enum")]))):
        return f"whole numbers from {_EXACT} on are not supported"
    return None


def _whole_numbers(value: Any) -> Iterator[int]:
    """All that are in a JSON value."""
    if isinstance(value, int):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _whole_numbers(each)
