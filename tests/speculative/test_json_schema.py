"""Schemas: what xgrammar would pass over is refused, and what is let through is kept."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar

from speculative.json_schema import ALL_LENGTHS, ALL_PATTERNS, LONGEST_PATTERN, LONGEST_STRING, unsupported

INTEGER, STRING = {"type": "integer"}, {"type": "string"}


def kind_is(value: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": value}, **properties}, "required": ["kind"]}


# A schema, what fits it, and what does not.
KEPT: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}, [{"a": 1}], [{}, {"a": "x"}, {"a": 1.5}, 3]),
    ({"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "minProperties": 1}, [{"b": 2}], [{}]),
    ({"type": "object", "additionalProperties": INTEGER, "maxProperties": 1}, [{}, {"x": 1}], [{"x": "y"}, {"x": 1, "y": 2}]),
    ({"type": "object", "properties": {"a": INTEGER}, "additionalProperties": False}, [{}], [{"b": 1}]),
    ({"type": "object", "patternProperties": {"^x$": INTEGER}, "additionalProperties": False}, [{"x": 1}], [{"x": "a"}, {"y": 1}]),
    ({"type": "object", "propertyNames": {"pattern": "^x+$"}, "additionalProperties": INTEGER}, [{"xx": 1}], [{"y": 1}]),
    ({"type": "object", "propertyNames": {"minLength": 2}, "additionalProperties": INTEGER}, [{"xx": 1}], [{"y": 1}]),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "日本"], ["a", "abcd"]),
    ({"type": "string", "pattern": "^[a-c]{2}$"}, ["ab"], ["a", "xy"]),
    ({"type": "string", "format": "date"}, ["2026-11-22"], ["tomorrow"]),
    ({"type": "string", "format": "email"}, ["a@example.org"], ["a b"]),
    ({"type": "integer", "minimum": 3, "exclusiveMaximum": 10}, [3, 9], [2, 10, 3.5]),
    ({"type": "integer", "multipleOf": 5}, [15], [16]),
    ({"type": "number", "minimum": -1.25, "maximum": 0.5}, [-1, 0.5], [-2, 0.75]),
    ({"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3], ["a"]]),
    ({"type": "array", "prefixItems": [INTEGER, STRING], "items": False}, [[1, "a"]], [["a", 1], [1, "a", 2]]),
    ({"enum": ["a", 1, None]}, ["a", 1, None], ["b", 2]),
    ({"type": ["string", "null"], "enum": ["a", None]}, ["a", None], ["b"]),
    ({"const": "é"}, ["é"], ["e"]),
    ({"anyOf": [INTEGER, {"type": "null"}]}, [1, None], ["a"]),
    ({"oneOf": [INTEGER, STRING]}, [1, "a"], [None]),
    ({"oneOf": [kind_is("a"), kind_is("b", n=INTEGER)]}, [{"kind": "a"}, {"kind": "b", "n": 1}], [{"kind": "c"}, {}]),
    ({"allOf": [INTEGER]}, [1], ["a"]),
    ({"$ref": "#/$defs/x", "$defs": {"x": INTEGER}}, [1], ["a"]),
    (
        {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}},
        [{"next": {"next": {}}}],
        [{"next": 1}, 3],
    ),
    ({"type": "integer", "format": "int32", "title": "A number", "x-unit": "s"}, [1], ["a"]),
    ({}, [1, "a", {"a": [None]}], []),
]


@pytest.mark.parametrize(("schema", "fitting", "others"), KEPT, ids=lambda value: json.dumps(value)[:60])
def test_schemas_that_are_let_through_are_kept(schema: Any, fitting: list[Any], others: list[Any]) -> None:
    assert unsupported(schema) is None
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False)
    for value in fitting + others:
        assert accepts(grammar, json.dumps(value, ensure_ascii=False)) == (value in fitting), value


def accepts(grammar: xgrammar.Grammar, text: str) -> bool:
    characters = xgrammar.TokenizerInfo(["<end>"], stop_token_ids=[0])
    matcher = xgrammar.GrammarMatcher(xgrammar.GrammarCompiler(characters).compile_grammar(grammar))
    return matcher.accept_string(text) and matcher.is_completed()


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": INTEGER}, "'not'"),
        ({"if": INTEGER, "then": {"type": "integer", "minimum": 5}}, "'if'"),
        ({"type": "object", "properties": {"a": INTEGER}, "dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
        ({"type": "array", "items": INTEGER, "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "array", "contains": INTEGER}, "'contains'"),
        ({"$dynamicRef": "#x"}, "'$dynamicRef'"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "'maxLength'"),
        ({"type": "string", "format": "email", "minLength": 3}, "'minLength'"),
        ({"type": "string", "format": "regex"}, "'format'"),
        ({"type": ["string", "null"], "format": "regex"}, "'format'"),
        ({"type": "string", "pattern": "(?=a)b"}, "Lookahead"),
        ({"type": "object", "patternProperties": {r"\bx": INTEGER}}, "Word boundary"),
        ({"type": "number", "multipleOf": 0.5}, "'multipleOf'"),
        ({"type": "integer", "multipleOf": 5, "minimum": 1}, "'multipleOf'"),
        ({"minimum": 5}, "'minimum'"),
        ({"minItems": 1, "items": INTEGER}, "'minItems'"),
        ({"type": []}, "'type'"),
        ({"type": "string", "maxLength": -1}, "'maxLength'"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "'required'"),
        ({"type": "object", "properties": {"a": INTEGER}, "anyOf": [{"required": ["a"]}]}, "beside 'anyOf'"),
        ({"$ref": "#/$defs/x", "minimum": 3, "$defs": {"x": INTEGER}}, "beside '$ref'"),
        ({"allOf": [INTEGER, {"type": "integer", "minimum": 5}]}, "'allOf'"),
        ({"anyOf": []}, "'anyOf'"),
        ({"oneOf": [INTEGER, {"type": "integer", "minimum": 5}]}, "'oneOf'"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "'oneOf'"),
        ({"oneOf": [kind_is("a"), kind_is("a")]}, "'oneOf'"),
        ({"type": "string", "enum": ["a", None]}, "'enum'"),
        ({"$ref": "https://example.org/schema"}, "'$ref'"),
        ({"$ref": "#/$defs/none"}, "'$ref'"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}, "'$ref'"),
        ({"type": "object", "properties": {"a": {"type": "array", "items": INTEGER}, "b": 3}}, "#/properties/b"),
        ([], "#"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_would_be_passed_over_is_refused_by_name(schema: Any, named: str) -> None:
    problem = unsupported(schema)
    assert problem is not None and named in problem


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "a" * (LONGEST_PATTERN + 1)}}}, "#/properties/a"),
        ({"type": "object", "patternProperties": {"a" * (LONGEST_PATTERN + 1): INTEGER}}, "#"),
        ({"$ref": "#/x/y", "x": {"y": {"type": "string", "pattern": "a" * (LONGEST_PATTERN + 1)}}}, "#/x/y"),
    ],
    ids=["pattern", "name", "referred to"],
)
def test_long_patterns_are_not_compiled(schema: Any, place: str) -> None:
    said = unsupported(schema) or ""
    assert f"has {LONGEST_PATTERN + 1} characters, and at most {LONGEST_PATTERN} are compiled (at {place})" in said


def test_patterns_of_the_longest_kind_are_compiled() -> None:
    fits = "a" * LONGEST_PATTERN
    # A property may be called so.
    named = {"type": "object", "properties": {"pattern": {"const": fits + "a"}, "patternProperties": {"const": 1}}}
    assert unsupported({"type": "string", "pattern": fits}) is None and unsupported(named) is None


def strings(*bounds: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}": {"type": "string", **each} for number, each in enumerate(bounds)}}


def test_strings_of_many_lengths_are_not_compiled() -> None:
    long = [{"minLength": number, "maxLength": 10_000} for number in range(ALL_LENGTHS // LONGEST_STRING)]
    assert unsupported(strings(*long)) is None
    assert f"come to {ALL_LENGTHS + 1}, and at most {ALL_LENGTHS} are" in (unsupported(strings(*long, {"maxLength": 1})) or "")
    assert unsupported(strings(*long, {"minLength": 1}, {"maxLength": -(10**9)}))


def test_strings_of_the_same_lengths_are_compiled_once() -> None:
    assert unsupported(strings(*[{"maxLength": 200}] * 400)) is None


def test_many_patterns_are_not_compiled() -> None:
    longest = [{"pattern": f"{number}" * LONGEST_PATTERN} for number in range(ALL_PATTERNS // LONGEST_PATTERN)]
    assert unsupported(strings(*longest, *longest)) is None
    assert f"have {ALL_PATTERNS + 1} characters, and at most {ALL_PATTERNS}" in (
        unsupported(strings(*longest, {"pattern": "a"})) or ""
    )


def test_refusals_say_where() -> None:
    deep = {"type": "object", "properties": {"list": {"type": "array", "items": {"anyOf": [INTEGER, {"type": [], "title": "x"}]}}}}
    assert "#/properties/list/items/anyOf/1" in (unsupported(deep) or "")
