"""JSON schemas as llguidance is to read them: values written in one way, objects closed, names that follow a schema.

https://github.com/guidance-ai/llguidance/blob/main/docs/json_schema.md says what it keeps; the rest it refuses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from speculative.json_alternatives import Alternatives
from speculative.json_places import Schema, changed, places, target
from speculative.json_refusals import combines, costly, is_remark, overlaps, read_otherwise, unwritten_form

_STRICT = {
    **{"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    "json_allowed_escapes": 'nrbtf"\\',  # no \uXXXX, by which a name could be written that has been written before
    **{"lenient": False, "coerce_one_of": False},
}
_LENIENT = _STRICT | {"lenient": True, "coerce_one_of": True}

_NAMED = frozenset({"properties", "patternProperties"})
_OTHERS = frozenset({"additionalProperties", "unevaluatedProperties"})

_OVERLAPPING = (
    "a value might fit two schemas of 'oneOf', which is not supported: use 'anyOf', "
    "or give them different types, or objects a common property with different constants"
)

_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_OUTLINE = frozenset(
    {
        *("type", "enum", "const", "properties", "required", "additionalProperties", "items", "prefixItems"),
        *("anyOf", "$ref", "$defs", "definitions"),
    }
)

_ALL_BUT = re.compile(r"((?<!\\)(?:\\\\)*\[\^)(?!\])")


def prepared(schema: Any, *, lenient: bool = False) -> Schema:
    """``schema`` for llguidance: its values are written as json.dumps writes them.

    An object has no properties but those that its schema names, unless that speaks of others; where schemas are combined anywhere,
    all objects are as open as JSON Schema has them. If ``lenient``, what cannot be kept is passed over. Raises ValueError for what
    is no schema, would take too long, or cannot be kept although llguidance would take it.
    """
    if not isinstance(schema, dict | bool):
        raise ValueError("# is no schema: it must be an object")
    if schema in (False, {"not": {}}):
        raise ValueError("no value fits this schema")
    root: Schema = schema if isinstance(schema, dict) else {}
    found = list(places(root))
    schemas = [each for each, _ in found]
    if (problem := costly(root, schemas)) is not None:
        raise ValueError(problem)
    if not lenient:
        _check_references(root, found)
        for each, place in found:
            if (problem := unwritten_form(each)) is not None:
                raise ValueError(f"{problem} (at {place})")
    overlapping = any(map(overlaps, schemas))
    # Where others speak of an object too, each is to leave room for what they name.
    closed = not any(combines(each, _NAMED | _OTHERS) for each in schemas)
    alternatives = Alternatives(root, closed=closed)

    def made(each: Schema, original: Schema) -> Schema:
        each, apart = alternatives.made(each, original)
        if not lenient and not apart:
            raise ValueError(f"{_OVERLAPPING} (at {next(place for schema, place in found if schema is original)})")
        # Of older drafts llguidance would pass over what these did not know.
        each = {key: value for key, value in each.items() if key != "$schema" and not (key == "format" and is_remark(value))}
        each = _with_quotes_kept_out(_named_by(each, root))
        if closed and not _NAMED.isdisjoint(each) and _OTHERS.isdisjoint(each):
            each = each | {"additionalProperties": False}
        if not lenient and (problem := read_otherwise(each, overlapping)) is not None:
            raise ValueError(problem)
        return each

    whole = alternatives.with_copies(changed(root, made), made)
    return whole | {"x-guidance": _LENIENT if lenient else _STRICT}


def outline(schema: Schema) -> Schema:
    """What of a schema can be followed whatever else it says: types, names, items, constants, references that lead somewhere."""

    def made(each: Schema, original: Schema) -> Schema:
        kept = {key: value for key, value in each.items() if key in _OUTLINE}
        types = kept.get("type", [])
        if not all(isinstance(name, str) and name in _TYPES for name in (types if isinstance(types, list) else [types])):
            del kept["type"]
        if not isinstance(target(kept.get("$ref"), schema), dict):
            kept.pop("$ref", None)
        return kept if {"patternProperties", "propertyNames"}.isdisjoint(each) else kept | {"additionalProperties": True}

    whole: Schema = changed(schema, made)
    return whole


def place_of(schema: Any, problem: str) -> str:
    """Where in a schema stands what llguidance says of it, as far as its words tell: " (at #/…)" or nothing."""
    words = set(re.findall(r"[\w$]+", problem)) | ({"minProperties", "maxProperties"} if "min/maxProperties" in problem else set())
    found = [place for each, place in places(schema) if not words.isdisjoint(each)] if isinstance(schema, dict) else []
    return f" (at {found[0]})" if len(found) == 1 else ""


def _check_references(root: Schema, schemas: Sequence[tuple[Schema, str]]) -> None:
    known = {id(each) for each, _ in schemas}
    for each, place in schemas:
        reference = each.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            found = target(reference, root)
            if not isinstance(found, bool) and id(found) not in known:
                raise ValueError(f"'$ref': {reference!r} leads to no schema (at {place})")


def _named_by(schema: Schema, root: Schema) -> Schema:
    """What ``propertyNames`` asks for by properties and patterns, which llguidance knows."""
    names = schema.get("propertyNames")
    names = target(names["$ref"], root) if isinstance(names, dict) and names.keys() == {"$ref"} else names
    if not isinstance(names, dict) or not _NAMED.isdisjoint(schema) or names.get("type", "string") != "string":
        return schema
    rest = {key: value for key, value in schema.items() if key not in _OTHERS | {"propertyNames"}}
    value = next((schema[each] for each in sorted(_OTHERS) if each in schema), True)
    match {key: names[key] for key in names if key not in ("type", "title", "description")}:
        case {"enum": [*listed], **others} if not others and all(isinstance(each, str) for each in listed):
            return rest | {"properties": {each: value for each in listed}, "additionalProperties": False}
        case {"pattern": str(pattern), **others} if not others:
            return rest | {"patternProperties": {pattern: value}, "additionalProperties": False}
        case {**lengths} if lengths and lengths.keys() <= {"minLength", "maxLength"}:
            pattern = rf"^[\s\S]{{{lengths.get('minLength', 0)},{lengths.get('maxLength', '')}}}$"
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
