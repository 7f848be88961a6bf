"""Which JSON schemas xgrammar keeps to the letter: what it would pass over in silence is named here instead."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from speculative.json_grammar import LONGEST_STRING
from speculative.json_patterns import names_found, pattern_problem

IGNORED = frozenset(
    {
        *("not", "if", "then", "else"),
        *("dependentRequired", "dependentSchemas", "dependencies"),
        *("contains", "minContains", "maxContains", "uniqueItems"),
        *("$dynamicRef", "$recursiveRef"),
    }
)
"""Keywords that xgrammar 0.2 passes over."""

FORMATS = frozenset(
    {
        *("date", "time", "date-time", "duration"),
        *("email", "hostname", "ipv4", "ipv6", "uri", "uri-reference", "uri-template"),
        "uuid",
    }
)
"""Formats of strings that it writes; formats of numbers say nothing about their text.

It writes JSON pointers too, but with quotes and line breaks as they are.
"""

LONGEST_PATTERN = 2**10
"""Characters of a regular expression: one of so many options takes a second to compile, and twice as many take five."""

ALL_PATTERNS = 2**13
"""Characters of a schema's patterns together, each counted once."""

ALL_LENGTHS = 2**12
"""Characters that a schema's strings are counted to: each takes a look at every token; so many of 8,192 took 8 s on a slow core.

Strings of the same lengths share it.
"""

_ALTERNATIVES = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""Each of them stands for a whole value: xgrammar reads one of them and none of what is beside it."""

_BESIDE = frozenset(
    {
        *("$schema", "$id", "$defs", "definitions", "$comment", "$anchor"),
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
    }
)
"""What may stand beside them, as it asks for nothing. A ``type`` may stand beside values that are listed."""

_SCHEMAS = ("additionalProperties", "unevaluatedProperties", "unevaluatedItems", "items", "propertyNames")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_OTHERS = ("additionalProperties", "unevaluatedProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def unsupported(schema: Any) -> str | None:
    """Why a text that xgrammar lets through might break ``schema``: the keyword, and where it stands; None if none can."""
    return costly(schema) or next(_problems(schema, schema, "#", set()), None)


def costly(node: Any) -> str | None:
    """What in a schema, or in anything that holds schemas, takes too long to compile; None if nothing does.

    It may stand anywhere, as a ``$ref`` leads anywhere.
    """
    lengths: dict[str, float] = {}
    patterns: set[str] = set()
    for each, place in _objects(node, "#"):
        names = each.get("patternProperties")
        for pattern in (each.get("pattern"), *(names if isinstance(names, dict) else ())):
            if isinstance(pattern, str):
                patterns.add(pattern)
                if len(pattern) > LONGEST_PATTERN:
                    return f"a pattern has {len(pattern)} characters, and at most {LONGEST_PATTERN} are compiled (at {place})"
        least, most = each.get("minLength"), each.get("maxLength")
        if numbers := [number for number in (least, most) if isinstance(number, int | float)]:
            lengths[f"{least} to {most}"] = max(0, min(LONGEST_STRING, max(numbers)))
    if (total := sum(map(len, patterns))) > ALL_PATTERNS:
        return f"its patterns have {total} characters, and at most {ALL_PATTERNS} are compiled"
    if (total := int(sum(lengths.values()))) > ALL_LENGTHS:
        return (
            f"the lengths of its strings (minLength and maxLength, each pair once and up to {LONGEST_STRING}) come to {total}, "
            f"and at most {ALL_LENGTHS} are compiled: leave some out, or give several strings the same"
        )
    return None


def _objects(node: Any, place: str) -> Iterator[tuple[dict[str, Any], str]]:
    if isinstance(node, dict):
        yield node, place
    for key, each in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from _objects(each, f"{place}/{key}")


def _problems(schema: Any, root: Any, place: str, seen: set[str]) -> Iterator[str]:
    """``seen`` are the references that have been followed: one may lead to where no keyword does."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        yield f"{place} is no schema: it must be an object"
        return
    yield from (
        f"'{keyword}' is not supported (at {place})" for keyword in schema if keyword in IGNORED and schema[keyword] is not False
    )
    yield from _beside_each_other(schema, place)
    yield from _values(schema, root, place)
    for keyword in _SCHEMAS:
        if isinstance(schema.get(keyword), dict):
            # Names are strings, and need not be said to be.
            inner = {"type": "string"} | schema[keyword] if keyword == "propertyNames" else schema[keyword]
            yield from _problems(inner, root, f"{place}/{keyword}", seen)
    for keyword in _MAPS:
        if isinstance(some := schema.get(keyword), dict):
            for name, each in some.items():
                yield from _problems(each, root, f"{place}/{keyword}/{name}", seen)
    for keyword in _LISTS:
        if isinstance(listed := schema.get(keyword), list):
            for number, each in enumerate(listed):
                yield from _problems(each, root, f"{place}/{keyword}/{number}", seen)
    if isinstance(reference := schema.get("$ref"), str) and reference not in seen:
        seen.add(reference)
        yield from _problems(_target(reference, root), root, reference, seen)


def _beside_each_other(schema: Mapping[str, Any], place: str) -> Iterator[str]:
    whole = next((keyword for keyword in _ALTERNATIVES if keyword in schema), None)
    if whole is None:
        return
    allowed = _BESIDE | {whole, "type"} if whole in ("enum", "const") else _BESIDE | {whole}
    if beside := next((keyword for keyword in schema if keyword in _KNOWN and keyword not in allowed), None):
        yield f"'{beside}' is not supported beside '{whole}' (at {place}): put it into what '{whole}' stands for"


def _values(schema: Mapping[str, Any], root: Any, place: str) -> Iterator[str]:
    types = schema.get("type")
    if types is None and (keyword := next((each for each in schema if each in _OF_A_TYPE), None)):
        yield f"'{keyword}' is supported where a 'type' stands beside it only (at {place})"
    if types == []:
        yield f"'type' must not be empty (at {place})"
    yield from _strings(schema, place)
    yield from _names(schema, place)
    if "multipleOf" in schema and (types != "integer" or not schema.keys().isdisjoint(_RANGE)):
        yield f"'multipleOf' is supported for integers without a range only (at {place})"
    for keyword in _COUNTS & schema.keys():
        if type(count := schema[keyword]) is not int or count < 0:
            yield f"'{keyword}' must be a whole number that is not negative (at {place})"
    named = schema.get("properties") or {}
    missing = next((name for name in schema.get("required") or () if isinstance(named, dict) and name not in named), None)
    if missing is not None:
        yield f"'required' names {missing!r}, which 'properties' does not have (at {place})"
    yield from _alternatives(schema, root, place)


def _strings(schema: Mapping[str, Any], place: str) -> Iterator[str]:
    # Texts of a form are written as the form says, and are of whatever length.
    form = next((keyword for keyword in ("pattern", "format") if keyword in schema), None)
    if form is not None and ("minLength" in schema or "maxLength" in schema):
        yield f"'minLength' and 'maxLength' are not supported beside '{form}' (at {place})"
    if (kind := schema.get("format")) is not None and "string" in _types(schema) and kind not in FORMATS:
        yield f"'format': {kind!r} is not supported (at {place})"
    for pattern in (*([schema["pattern"]] if "pattern" in schema else ()), *(schema.get("patternProperties") or ())):
        if (why := pattern_problem(str(pattern))) is not None:
            yield f"the pattern {pattern!r} is not supported (at {place}): {why}"


def _names(schema: Mapping[str, Any], place: str) -> Iterator[str]:
    named, patterns = schema.get("properties") or {}, schema.get("patternProperties") or {}
    others = next((each for each in _OTHERS if schema.get(each) not in (None, False)), None)
    if not isinstance(named, dict) or not isinstance(patterns, dict):
        yield f"'properties' and 'patternProperties' must be objects (at {place})"
        return
    if "propertyNames" in schema:
        beside = [each for each in ("properties", "patternProperties") if schema.get(each)]
        beside += [each for each in _OTHERS if schema.get(each) is False]
        if beside:
            yield f"'propertyNames' is not supported beside '{beside[0]}' (at {place}): leave one of them out"
    if named and patterns and others is not None:
        yield f"'{others}' is not supported beside 'properties' and 'patternProperties' (at {place}): leave one of the three out"
    if len(patterns) > 1 and not _all_equal(patterns.values()):
        yield f"'patternProperties' of several schemas are not supported (at {place}), as a name may match more than one pattern"
    for pattern, schema_of_it in patterns.items():
        for name in names_found(pattern, [name for name in named if not _all_equal([named[name], schema_of_it])]):
            yield f"'patternProperties' must not match {name!r}, which 'properties' has (at {place}): make {pattern!r} narrower"
    least, required = schema.get("minProperties"), schema.get("required") or ()
    is_open = "object" in _types(schema) and (not named or patterns or others is not None)
    # A name may be written twice, and then counts once.
    if is_open and isinstance(least, int) and least > max(1, len(required)):
        yield (
            f"'minProperties' above 1 and the number of 'required' names is not supported where names are open (at {place}): "
            "name the properties, or leave it out"
        )


def _all_equal(schemas: Iterable[Any]) -> bool:
    return len({_text(schema) for schema in schemas}) == 1


def _alternatives(schema: Mapping[str, Any], root: Any, place: str) -> Iterator[str]:
    for keyword in _LISTS:
        if schema.get(keyword) == []:
            yield f"'{keyword}' must not be empty (at {place})"
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if "type" in schema and isinstance(listed, list) and (wrong := [one for one in listed if not _is_one(one, _types(schema))]):
        yield f"'enum' has {wrong[0]!r}, which 'type' excludes (at {place})"
    if isinstance(every := schema.get("allOf"), list) and len(every) > 1:
        yield f"'allOf' of more than one schema is not supported (at {place})"
    if isinstance(one := schema.get("oneOf"), list) and not _disjoint([_resolved(each, root) for each in one]):
        yield f"'oneOf' is supported where a type or a constant property tells its schemas apart, else use 'anyOf' (at {place})"
    if "$ref" in schema and _resolved(schema, root) is None:
        yield f"'$ref': {schema['$ref']!r} leads nowhere (at {place})"


def _types(schema: Mapping[str, Any]) -> list[Any]:
    types = schema.get("type", [])
    return types if isinstance(types, list) else [types]


def _is_one(value: Any, types: Sequence[Any]) -> bool:
    """Whether a JSON value is of one of these types."""
    match value:
        case None:
            return "null" in types
        case bool():
            return "boolean" in types
        case int():
            return "integer" in types or "number" in types
        case float():
            return "number" in types or ("integer" in types and value.is_integer())
        case str():
            return "string" in types
        case list():
            return "array" in types
    return "object" in types


def _disjoint(schemas: Sequence[Any]) -> bool:
    """Whether a value that fits one of them surely fits no other: by their types, or by a constant that all of them require."""
    if not all(isinstance(schema, dict) for schema in schemas):
        return False
    types = [schema.get("type") for schema in schemas]
    if all(isinstance(each, str) for each in types) and len(set(types)) == len(types) and {"integer", "number"} - set(types):
        return True
    return any(
        all(name in (schema.get("required") or ()) for schema in schemas)
        and _all_differ([_constants(schema, name) for schema in schemas])
        for name in (schemas[0].get("properties") or {})
    )


def _constants(schema: Mapping[str, Any], name: str) -> list[str]:
    """The values that a property may have, as text; [] where these are not listed."""
    listed = (schema.get("properties") or {}).get(name)
    if not isinstance(listed, dict):
        return []
    return [_text(value) for value in ([listed["const"]] if "const" in listed else listed.get("enum") or ())]


def _text(value: Any) -> str:
    """The same for equal JSON values: 1 and 1.0 are, and 1 and true are not."""

    def number(text: str) -> float:
        return int(each) if (each := float(text)).is_integer() else each

    return json.dumps(json.loads(json.dumps(value), parse_float=number), sort_keys=True)


def _all_differ(constants: Sequence[Sequence[str]]) -> bool:
    values = [value for some in constants for value in set(some)]
    return all(constants) and len(set(values)) == len(values)


def _resolved(schema: Any, root: Any) -> Any:
    """What a chain of references inside the document leads to; None where that is nothing."""
    for _ in range(64):  # a circle of references leads nowhere either
        if not (isinstance(schema, dict) and "$ref" in schema):
            return schema
        schema = _target(schema["$ref"], root)
    return None


def _target(reference: Any, root: Any) -> Any:
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    for step in reference.removeprefix("#").split("/")[1:]:
        root = root.get(step) if isinstance(root, dict) else None
    return root


_RANGE = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_OF_A_TYPE = _RANGE | _COUNTS | {"pattern", "format", "multipleOf"}
_KNOWN = frozenset({*_ALTERNATIVES, *_SCHEMAS, *_MAPS, *_LISTS, *_OF_A_TYPE, "type", "required"})
"""Keywords that ask for something; others are notes."""
