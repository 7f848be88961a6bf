"""Schemas: what cannot be kept is refused, and what is let through is kept."""

from __future__ import annotations

import json
from typing import Any

import pytest

from models.loader import BUNDLED, load_tokenizer
from speculative.errors import InvalidRequestError
from speculative.grammar import Grammars
from speculative.request import Grammar

INTEGER, STRING = {"type": "integer"}, {"type": "string"}


def doubled(times: int) -> dict[str, Any]:
    """A schema that is two of the next, and so on."""
    once = {f"x{number}": {"allOf": [{"$ref": f"#/$defs/x{number + 1}"}] * 2} for number in range(times)}
    return {"$ref": "#/$defs/x0", "$defs": {**once, f"x{times}": INTEGER}}


def kind_is(value: Any, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": value}, **properties}, "required": ["kind"]}


# A schema, what fits it, and what does not.
KEPT: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}, [{"a": 1}], [{}, {"a": "x"}, {"a": 1.5}, 3]),
    ({"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "minProperties": 1}, [{"b": 2}], [{}]),
    (
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["a"], "minProperties": 2},
        [{"a": 1, "b": 2}],
        [{"a": 1}],
    ),
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


END = 2
TOKENIZER = load_tokenizer(BUNDLED["target"])
assert TOKENIZER is not None
GRAMMARS = Grammars(TOKENIZER, len(TOKENIZER), [END])


class Accepts:
    """Whether a schema lets a text through."""

    def __init__(self, schema: Any) -> None:
        self._grammar = Grammar("json_schema", json.dumps(schema))
        GRAMMARS.compile(self._grammar)

    def __call__(self, text: str) -> bool:
        matcher = GRAMMARS.follow(self._grammar)
        return all(map(matcher.accept, [*TOKENIZER.encode(text, add_special_tokens=False), END]))


def refused(schema: Any) -> str:
    """Why a schema is refused; "" if it is not."""
    try:
        Accepts(schema)
    except InvalidRequestError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("schema", "fitting", "others"), KEPT, ids=lambda value: json.dumps(value)[:60])
def test_schemas_that_are_let_through_are_kept(schema: Any, fitting: list[Any], others: list[Any]) -> None:
    accepts = Accepts(schema)
    for value in fitting + others:
        assert accepts(json.dumps(value, ensure_ascii=False)) == (value in fitting), value


CONTROLS = [chr(number) for number in range(0x20)]


@pytest.mark.parametrize(
    "bounds", [{"maxLength": 1}, {"minLength": 1, "maxLength": 1}, {"maxLength": 9}, {"minLength": 1}], ids=str
)
def test_counted_strings_are_json(bounds: dict[str, int]) -> None:
    accepts = Accepts({"type": "object", "properties": {"t": {"type": "string", **bounds}}, "required": ["t"]})
    for raw in [*CONTROLS, '"', "\\"]:
        assert not accepts(f'{{"t": "{raw}"}}')
    for character in '\b\f\n\r\t"\\/é😀':
        assert accepts(json.dumps({"t": character}, ensure_ascii=False))
    assert not accepts(r'{"t": "\q"}')


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
    accepts = Accepts(schema)
    ends = [least, most or least + 500, 128, 256, 384]
    for length in {end + more for end in ends for more in (-1, 0, 1) if end + more >= 0} | set(range(least, ends[1], 61)):
        for character in ("a", "日", "😀", "\n"):
            text = json.dumps(character * length, ensure_ascii=False)
            assert accepts(text) == (least <= length and (most is None or length <= most)), length


def test_names_that_are_counted_are_json() -> None:
    accepts = Accepts({"type": "object", "propertyNames": {"minLength": 2}, "additionalProperties": INTEGER})
    assert accepts(r'{"a\n": 1}') and not accepts('{"a\t": 1}')


FORMATS = [
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"),
]


@pytest.mark.parametrize("form", FORMATS)
def test_forms_write_json(form: str) -> None:
    accepts = Accepts({"type": "string", "format": form})
    around = ["{}", "a{}@b.org", r"\"{}\"@b.org", "/{}", "a:{}", "2{}"]
    for raw in [*CONTROLS, '"', "\\", r"\a", r"\ "]:
        assert not any(accepts(f'"{each.replace("{}", raw)}"') for each in around)


@pytest.mark.parametrize(
    "pattern", ["^.*$", r"^[^b]+$", r"\S+", r"^\W{0,3}$", '^(a|")*$', "^[ -~]*$", r"^\u00e9.*$", "^\t$", r"^a\\b$"]
)
def test_patterns_write_json(pattern: str) -> None:
    accepts = Accepts({"type": "string", "pattern": pattern})
    for raw in [*CONTROLS, '"', "\\"]:
        assert not any(accepts(f'"{before}{raw}"') for before in ("", "a", "é"))


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        ("b", ["abc", "b"], ["a", ""]),
        ("^a", ["abc"], ["ba"]),
        ("c$", ["abc"], ["ca"]),
        ("^a$|^b$", ["a", "b"], ["ab", "xa"]),
        ("^a|b$", ["ax", "xb"], ["xax"]),
        (r"^\$[0-9]$", ["$1"], ["1"]),
        ("^[äöü]+$", ["äö"], ["a"]),
        ("^.{1,200}$", ["日" * 200], ["", "a" * 201]),
        ('^"\n$', ['"\n'], ["n"]),
        ('^[^"]*$', ["a\\", "\t\n"], ['"', 'a"']),
        ('^[^"\n]*$', ["a\\", "\t"], ['"', "\n"]),
        (r"^([^/\\]+/)*[^/\\]+$", ['a/b"', "\n"], ["a\\b", "//"]),
        (r"^\[\^[a]$", ["[^a"], ["["]),
        (r"^a\\b$", [r"a\b"], ["ab"]),
    ],
)
def test_patterns_are_kept(pattern: str, fitting: list[str], others: list[str]) -> None:
    accepts = Accepts({"type": "string", "pattern": pattern})
    for text in fitting + others:
        assert accepts(json.dumps(text, ensure_ascii=False)) == (text in fitting), text


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": INTEGER}, "'not' is not supported"),
        ({"if": INTEGER, "then": {"type": "integer", "minimum": 5}}, "'if', 'then' are not supported"),
        ({"type": "object", "properties": {"a": INTEGER}, "dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
        ({"type": "array", "items": INTEGER, "uniqueItems": True}, "'uniqueItems'"),
        ({"type": "array", "contains": INTEGER}, "'contains'"),
        ({"$dynamicRef": "#x"}, "'$dynamicRef'"),
        ({"type": ["string", "null"], "format": "regex"}, "the format 'regex'"),
        ({"type": "string", "format": "json-pointer"}, "the format 'json-pointer'"),
        ({"type": "string", "pattern": "(?=a)b"}, "look"),
        ({"type": "string", "pattern": "a$b"}, "look"),
        ({"type": "object", "patternProperties": {r"\bx": INTEGER}}, "look"),
        ({"type": []}, "anyOf is empty"),
        ({"type": "string", "maxLength": -1}, "'maxLength'"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
        ({"type": "object", "properties": {}, "required": ["a"]}, "required property 'a'"),
        ({"oneOf": [INTEGER, {"type": "integer", "minimum": 5}]}, "oneOf"),
        ({"oneOf": [kind_is("a"), kind_is("a")]}, "oneOf"),
        ({"oneOf": [kind_is(1), kind_is(1.0)]}, "oneOf"),
        ({"$ref": "https://example.org/schema"}, "https://example.org/schema"),
        ({"$ref": "#/$defs/none"}, "/$defs/none"),
        ({"type": "object", "properties": {"a": {"type": "array", "items": INTEGER}, "b": 3}}, "must be an object"),
        ([], "must be an object"),
        (False, "no value fits"),
        ({"type": "object", "properties": {"ab": INTEGER}, "propertyNames": {"pattern": "^a$"}}, "'propertyNames'"),
        ({"type": "object", "propertyNames": {"pattern": "^a", "minLength": 3}}, "'propertyNames'"),
        ({"type": "object", "patternProperties": {"^a": INTEGER, "b$": STRING}}, "not disjoint"),
        ({"type": "object", "propertyNames": {"pattern": "x*"}, "minProperties": 3}, "'minProperties'"),
        ({"type": "object", "additionalProperties": INTEGER, "minProperties": 2}, "'minProperties'"),
        ({"type": "object", "minProperties": 2, "required": 5}, "'minProperties'"),
        ({"type": "string", "pattern": ["a"]}, "pattern"),
        ({"$ref": "#/parts/t", "parts": {"t": {"type": "object", "minProperties": 2}}}, "'minProperties'"),
        ({"type": "object", "propertyNames": {"type": "integer", "enum": ["a"]}}, "'propertyNames'"),
        ({"type": "array", "prefixItems": [INTEGER], "additionalItems": False}, "'additionalItems'"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "'exclusiveMinimum'"),
        ({"type": "integer", "minimum": 2**53 + 1}, "whole numbers from"),
        ({"enum": [{"a": [2**53 + 1]}]}, "whole numbers from"),
        ({"type": "integer", "exclusiveMinimum": 1e17}, "whole numbers from"),
        (
            {"type": "object", "propertyNames": {"$ref": "#/$defs/n", "minLength": 5}, "$defs": {"n": {"pattern": "^a"}}},
            "'propertyNames'",
        ),
        ({"anyOf": [{"type": "number", "exclusiveMinimum": 3}], "maximum": 3.25}, "for integers only"),
        ({"allOf": [{"type": "integer", "multipleOf": 65536}, {"multipleOf": 65537}]}, "'multipleOf'"),
        ({"allOf": [{"type": "integer", "multipleOf": 3001}, {"multipleOf": 2989}]}, "'multipleOf'"),
        ({"type": "number", "allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, "for integers only"),
        ({"type": "object", "minProperties": 2, "$ref": "#/$defs/a", "$defs": {"a": {"required": ["a"]}}}, "'minProperties'"),
        (doubled(18), "are combined"),
        ({"type": "string", "allOf": [{"pattern": f"a{number}.*b"} for number in range(20)]}, "16 patterns are combined"),
        ({"patternProperties": {f"^k{number}_": INTEGER for number in range(65)}}, "has 65 patterns"),
        ({"anyOf": [{"type": "integer", "multipleOf": step} for step in (997, 991)]}, "above 100 once"),
        ({"$ref": "#"}, "no text could follow it"),
        ({"$ref": "#/default", "default": INTEGER}, "leads to no schema (at #)"),
        ({"$ref": "#/parts/0", "parts": [INTEGER]}, "leads to no schema"),
        ({"type": "array", "items": [INTEGER]}, "'prefixItems'"),
        ({"const": "\x01"}, "control characters"),
        *(
            ({"type": "string", "pattern": pattern}, "leave")
            for pattern in ("^[[a]]$", r"^a\z", "(?i)a", r"^\p{Cc}$", r"^\P{P}$", r"^[\x00-\x1f]$", "^[]a]$")
        ),
        ({"type": "string", "pattern": "a?" * 1025}, "2050 characters, and at most 2048 are compiled"),
        ({"patternProperties": {"a?" * 1025: INTEGER}}, "2050 characters, and at most 2048 are compiled"),
        (
            {"anyOf": [{"type": "string", "pattern": f"{number}" * 2000} for number in range(5)]},
            "10000 characters, and at most 8192",
        ),
        ({"type": "object", "x-guidance": {"lenient": True}, "not": {}, "title": "no way around"}, "'not'"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_cannot_be_kept_is_refused(schema: Any, named: str) -> None:
    assert named in refused(schema)


COMBINED = [
    ({"type": "object", "properties": {"a": INTEGER}, "anyOf": [{"required": ["a"]}]}, [{"a": 1}], [{}, {"a": "x"}]),
    ({"$ref": "#/$defs/x", "minimum": 3, "$defs": {"x": INTEGER}}, [3], [2, "a"]),
    ({"allOf": [INTEGER, {"type": "integer", "minimum": 5}]}, [5], [4]),
    (
        {"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"b": STRING}, "required": ["b"]}], "$defs": {"base": kind_is("x")}},
        [{"kind": "x", "b": "y"}],
        [{"kind": "x"}, {"b": "y"}, {"kind": "y", "b": "y"}],
    ),
    ({"type": "string", "enum": ["a", None]}, ["a"], [None]),
    ({"type": "string", "pattern": "^a+$", "maxLength": 3}, ["aaa"], ["aaaa", "b"]),
    ({"type": "number", "multipleOf": 0.5}, [1.5, 2], [0.3]),
    ({"type": "integer", "multipleOf": 5, "minimum": 1}, [5], [0, 6]),
    ({"minimum": 5}, [5, "a", [1]], [4]),
    (
        {
            "type": "object",
            "properties": {"b": STRING},
            "patternProperties": {"^a$": INTEGER},
            "additionalProperties": {"const": 0},
        },
        [{"b": "x", "a": 1, "c": 0}],
        [{"a": "x"}, {"b": 0}, {"c": 1}],
    ),
]


@pytest.mark.parametrize(("schema", "fitting", "others"), COMBINED, ids=lambda value: json.dumps(value)[:60])
def test_schemas_are_combined(schema: Any, fitting: list[Any], others: list[Any]) -> None:
    test_schemas_that_are_let_through_are_kept(schema, fitting, others)


def test_names_are_written_in_one_way() -> None:
    schema = {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": STRING}
    accepts = Accepts(schema)
    assert accepts('{"a": 1, "b": "x\\n"}') and not accepts('{"\\u0061": "x"}') and not accepts('{"a": 1, "a": "x"}')


def test_references_are_followed_by_their_names() -> None:
    parts = {"a/b": {"x~y %": INTEGER}}
    accepts = Accepts({"$ref": "#/parts/a~1b/x~0y%20%25", "parts": parts})
    assert accepts("1") and not accepts('"a"')


def test_where_schemas_are_combined_objects_are_open_and_else_closed() -> None:
    inner = {"type": "object", "properties": {"a": INTEGER}}
    assert not Accepts({"type": "array", "items": inner})('[{"a": 1, "b": 2}]')
    assert Accepts({"type": "array", "items": {"allOf": [inner, {"required": ["a"]}]}})('[{"a": 1, "b": 2}]')


def test_refusals_say_where() -> None:
    deep = {"type": "object", "properties": {"list": {"type": "array", "items": {"anyOf": [INTEGER, {"not": {}, "title": "x"}]}}}}
    assert refused(deep) == "'not' is not supported (at #/properties/list/items/anyOf/1)"
    assert "(at" not in refused({"anyOf": [{"not": {}}, {"not": INTEGER}]}), "it may be either"


def test_large_schemas_are_compiled() -> None:
    lengths = {f"p{number}": {"type": "string", "minLength": number, "maxLength": 10_000} for number in range(200)}
    patterns = {f"q{number}": {"type": "string", "pattern": f"^{'a?' * 200}{number}$"} for number in range(20)}
    accepts = Accepts({"type": "object", "properties": lengths | patterns, "required": ["p3", "q7"]})
    assert accepts('{"p3": "abc", "q7": "aa7"}') and not accepts('{"p3": "ab", "q7": "aa7"}')
