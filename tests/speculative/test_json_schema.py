"""Schemas: what xgrammar would pass over is refused, and what is let through is kept."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar

from speculative.json_grammar import LONGEST_STRING, grammar
from speculative.json_schema import ALL_LENGTHS, ALL_PATTERNS, FORMATS, LONGEST_PATTERN, unsupported

INTEGER, STRING = {"type": "integer"}, {"type": "string"}


def kind_is(value: Any, **properties: Any) -> dict[str, Any]:
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
    ({"type": "object", "properties": {"t": {"$ref": "#/parts/t"}}, "parts": {"t": INTEGER}}, [{"t": 1}], [{"t": "a"}]),
    ({"type": "object", "propertyNames": {"enum": ["x", "y"]}}, [{"x": 1}, {"y": None}], [{"z": 1}]),
    ({"type": "object", "patternProperties": {"^x": INTEGER, "^y": {"type": "integer"}}}, [{"x": 1}, {"y": 1}], [{"z": 1}]),
    (
        {"type": "object", "properties": {"a": STRING}, "patternProperties": {"^x$": INTEGER}},
        [{"a": "b", "x": 1}],
        [{"a": 1}, {"x": "b"}],
    ),
    ({"type": "object", "properties": {"a": INTEGER}, "additionalProperties": STRING}, [{"a": 1, "b": "c"}], [{"a": "b"}]),
    ({"type": "object", "additionalProperties": INTEGER, "minProperties": 1}, [{"x": 1}], [{}]),
    ({"oneOf": [{**kind_is("x"), "properties": {"kind": {"enum": [1, "1"]}}}, kind_is("a")]}, [{"kind": 1}, {"kind": "a"}], [{}]),
]


@pytest.mark.parametrize(("schema", "fitting", "others"), KEPT, ids=lambda value: json.dumps(value)[:60])
def test_schemas_that_are_let_through_are_kept(schema: Any, fitting: list[Any], others: list[Any]) -> None:
    assert unsupported(schema) is None
    accepts = Accepts(schema)
    for value in fitting + others:
        assert accepts(json.dumps(value, ensure_ascii=False)) == (value in fitting), value


class Accepts:
    """Whether the grammar of a schema lets a text through."""

    def __init__(self, schema: Any) -> None:
        characters = xgrammar.TokenizerInfo(["<end>"], stop_token_ids=[0])
        self._compiled = xgrammar.GrammarCompiler(characters).compile_grammar(grammar(schema))

    def __call__(self, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(self._compiled)
        return matcher.accept_string(text) and matcher.is_completed()


CONTROLS = [chr(number) for number in range(0x20)]


@pytest.mark.parametrize(
    "bounds", [{"maxLength": 1}, {"minLength": 1, "maxLength": 1}, {"maxLength": 9}, {"minLength": 1}], ids=str
)
def test_counted_strings_are_json(bounds: dict[str, int]) -> None:
    accepts = Accepts({"type": "object", "properties": {"t": {"type": "string", **bounds}}, "required": ["t"]})
    for raw in [*CONTROLS, '"', "\\"]:
        assert not accepts(f'{{"t": "{raw}"}}')
    for character in '\b\f\n\r\t"\\/\x7fé😀':
        assert accepts(json.dumps({"t": character}, ensure_ascii=False))
    assert accepts(r'{"t": "\/"}') and not accepts(r'{"t": "\q"}')


@pytest.mark.parametrize(
    ("least", "most"),
    [
        *((0, 0), (0, 1), (0, 9), (3, 9), (2, 2), (5, None)),
        *((0, 128), (0, 129), (100, 256), (256, None), (0, 257), (257, None)),
        *((0, 300), (100, 300), (300, 310), (300, 450), (700, 1000), (999, 1001), (2000, None)),
    ],
)
def test_lengths_are_exact(least: int, most: int | None) -> None:
    schema = {"type": "string", "minLength": least} | ({} if most is None else {"maxLength": most})
    assert unsupported(schema) is None
    accepts = Accepts(schema)
    ends = [least, most or least + 500, 128, 256, 384]
    for length in {end + more for end in ends for more in (-1, 0, 1) if end + more >= 0} | set(range(least, ends[1], 61)):
        for character in ("a", "日", "😀", "\n"):
            text = json.dumps(character * length, ensure_ascii=False)
            assert accepts(text) == (least <= length and (most is None or length <= most)), length


def test_names_that_are_counted_are_json() -> None:
    accepts = Accepts({"type": "object", "propertyNames": {"minLength": 2}, "additionalProperties": INTEGER})
    assert accepts(r'{"a\n": 1}') and not accepts('{"a\t": 1}')


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_forms_write_json(form: str) -> None:
    accepts = Accepts({"type": "string", "format": form})
    around = ["{}", "a{}@b.org", r"\"{}\"@b.org", "/{}", "a:{}", "2{}"]
    for raw in [*CONTROLS, '"', "\\", r"\a", r"\ "]:
        assert not any(accepts(f'"{each.replace("{}", raw)}"') for each in around)


def test_quoted_addresses() -> None:
    accepts = Accepts({"type": "string", "format": "email"})
    for local in ("ab", '"a b"', r'"a\"b\\"'):
        assert accepts(json.dumps(f"{local}@example.org"))


@pytest.mark.parametrize("pattern", ["^.*$", r"^[^b]+$", r"\S+", r"^\W{0,3}$", '^(a|")*$', "^[ -~]*$", r"^\u00e9.*$"])
def test_patterns_write_json(pattern: str) -> None:
    assert unsupported({"type": "string", "pattern": pattern}) is None
    accepts = Accepts({"type": "string", "pattern": pattern})
    for raw in [*CONTROLS, '"', "\\"]:
        assert not any(accepts(f'"{before}{raw}"') for before in ("", "a", "é"))


@pytest.mark.parametrize("pattern", ["^a$|^b$", "^a|b$", r"^\$[0-9]$", "^[$^]$", "^[äöü]+$", "^.{128}.{0,72}$", r"^a,200,\{200\}$"])
def test_patterns_that_are_kept(pattern: str) -> None:
    assert unsupported({"type": "string", "pattern": pattern}) is None


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
        ({"type": "string", "format": "json-pointer"}, "'format': 'json-pointer'"),
        ({"type": "string", "format": "relative-json-pointer"}, "'format': 'relative-json-pointer'"),
        *(
            ({"type": "string", "pattern": pattern}, "a quote, a backslash or a control character")
            for pattern in ('^"$', r"\t", "\t", r"^a\\b$", "^é.$", "^é[^b]$", r"^\x07$")
        ),
        *(({"type": "string", "pattern": pattern}, "leave it out") for pattern in ("a$b", "a^b", "(a$)*b", "^(^a)+b", "(a|^b)")),
        ({"type": "string", "pattern": "^.{1,200}$"}, "more than 128 times: write"),
        ({"type": ["string", "object"], "pattern": "a", "patternProperties": {'^"$': INTEGER}}, "a quote"),
        (
            {"type": "object", "properties": {"t": {"$ref": "#/parts/t"}}, "parts": {"t": {"type": "array", "uniqueItems": True}}},
            "'uniqueItems' is not supported (at #/parts/t)",
        ),
        ({"$ref": "#/a", "a": {"$ref": "#/b", "minimum": 3}, "b": INTEGER}, "'minimum' is not supported beside '$ref' (at #/a)"),
        ({"type": "object", "properties": {"ab": INTEGER}, "propertyNames": {"pattern": "^a$"}}, "'propertyNames'"),
        ({"type": "object", "patternProperties": {"a": INTEGER}, "propertyNames": {"maxLength": 1}}, "'propertyNames'"),
        ({"type": "object", "propertyNames": {"pattern": "^a$"}, "additionalProperties": False}, "'propertyNames'"),
        ({"type": "object", "properties": {"ab": {"type": "number"}}, "patternProperties": {"b": INTEGER}}, "must not match 'ab'"),
        ({"type": "object", "patternProperties": {"^a": INTEGER, "b$": STRING}}, "'patternProperties' of several"),
        (
            {"type": "object", "properties": {"b": STRING}, "patternProperties": {"^a$": INTEGER}, "additionalProperties": STRING},
            "'additionalProperties' is not supported beside",
        ),
        ({"type": "object", "propertyNames": {"pattern": "x*"}, "minProperties": 3}, "'minProperties'"),
        ({"type": "object", "additionalProperties": INTEGER, "minProperties": 2}, "'minProperties'"),
        (
            {"type": "object", "properties": {"a": INTEGER}, "required": ["a"], "additionalProperties": True, "minProperties": 2},
            "'minProperties'",
        ),
        ({"oneOf": [kind_is(1), kind_is(1.0)]}, "'oneOf'"),
        ({"oneOf": [kind_is([{"a": 1}]), kind_is([{"a": 1.0}])]}, "'oneOf'"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_would_be_passed_over_is_refused_by_name(schema: Any, named: str) -> None:
    problem = unsupported(schema)
    assert problem is not None and named in problem


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("b", "abc"),
        ("^a", "abc"),
        ("c$", "abc"),
        ("^x|b", "abc"),
        (r"\$", "a$b"),
        ("(a+)+b", "a" * 60 + "b"),
        ("é", "né"),
        ("^$", ""),
    ],
)
def test_patterns_are_looked_for_within_names(pattern: str, found: str) -> None:
    schema = {"type": "object", "properties": {found: STRING}, "patternProperties": {pattern: INTEGER}}
    assert "must not match" in (unsupported(schema) or "")


@pytest.mark.parametrize(
    ("pattern", "other"), [("x", "abc"), ("^b", "abc"), ("b$", "abc"), ("^ab$", "abc"), (r"^a\$$", "a"), ("^(a+)+b$", "a" * 60)]
)
def test_patterns_that_names_do_not_have_may_stand_beside_them(pattern: str, other: str) -> None:
    schema = {"type": "object", "properties": {other: STRING}, "patternProperties": {pattern: INTEGER}}
    assert unsupported(schema) is None


def test_true_is_not_one() -> None:
    assert unsupported({"oneOf": [kind_is(1), kind_is(True)]}) is None


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
