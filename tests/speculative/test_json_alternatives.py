"""Alternatives by ``oneOf``: those that no value can fit two of are followed, as others' are refused; formats that are remarks."""

from __future__ import annotations

import json
from random import Random
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from speculative.request import Grammar
from tests.speculative.test_json_schema import GRAMMARS, INTEGER, STRING, Accepts, kind_is, refused

C, D = {"$ref": "#/$defs/C"}, {"$ref": "#/$defs/D"}
DEFS = {"C": kind_is("c"), "D": kind_is("d", n=INTEGER)}


def tagged(value: Any, **properties: Any) -> dict[str, Any]:
    """An object that may leave its tag out."""
    return {"type": "object", "properties": {"kind": {"const": value, "default": value}, **properties}}


def has(name: str, *others: str) -> dict[str, Any]:
    """An object that is told by a name."""
    return {"type": "object", "properties": {each: INTEGER for each in (name, *others)}, "required": [name]}


# A schema, what follows it, and what does not, though it may fit the schema.
APART: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"oneOf": [C, D], "$defs": DEFS}, [{"kind": "c"}, {"kind": "d", "n": 1}], [{"kind": "e"}, {}, {"kind": "c", "n": 1}]),
    ({"oneOf": [C, {"type": "null"}], "$defs": DEFS}, [{"kind": "c"}, None], [{}, 1]),
    ({"oneOf": [C, {"$ref": "#/$defs/S"}], "$defs": DEFS | {"S": {"enum": ["a", 1]}}}, [{"kind": "c"}, "a", 1], ["b", {}]),
    ({"oneOf": [{"const": 1}, {"enum": [True, [1]]}, {"const": [True]}]}, [1, True, [1], [True]], [False, 2, [2]]),
    ({"oneOf": [tagged("a"), tagged("b", n=INTEGER)]}, [{"kind": "a"}, {"kind": "b", "n": 1}], [{}, {"n": 1}]),
    (
        {"type": "object", "oneOf": [C, {"properties": {"kind": {"const": "x"}}, "required": ["kind"]}], "$defs": DEFS},
        [{"kind": "c"}, {"kind": "x"}],
        [{"kind": "d"}, "x"],
    ),
    (
        {
            "discriminator": {"propertyName": "b"},
            "oneOf": [has("a") | {"properties": {"a": {"const": x}, "b": {"const": x}}} for x in "xy"],
        },
        [{"a": "x", "b": "x"}],
        [{"a": "x"}, {"a": "x", "b": "y"}],
    ),
    ({"oneOf": [{"oneOf": [kind_is(1), kind_is(2)]}, kind_is(3), STRING]}, [{"kind": 2}, {"kind": 3}, "a"], [{"kind": 4}]),
    ({"oneOf": [INTEGER, STRING], "anyOf": [STRING, {"type": "null"}]}, ["a"], [1, None]),
    ({"oneOf": [has("a"), has("b")]}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
    ({"oneOf": [has("x") | {"properties": {"x": kind_is(each)}} for each in "ab"]}, [{"x": {"kind": "a"}}], [{"x": {}}, {}]),
    (
        {"type": "object", "properties": {"a": {"oneOf": [INTEGER, STRING]}, "b": {"$ref": "#/properties/a/oneOf/1"}}},
        [{"a": 1, "b": "x"}, {"a": "x"}],
        [{"b": 1}],
    ),
    (
        {"oneOf": [{"$ref": "#/$defs/A"}, {"allOf": [{"$ref": "#/$defs/B"}], "required": ["kind"]}]}
        | {"$defs": {"A": {"$ref": "#/$defs/tagged-0"}, "tagged-0": tagged("a"), "B": tagged("b")}},
        [{"kind": "a"}, {"kind": "b"}],
        [{}],
    ),
]


@pytest.mark.parametrize(("schema", "fitting", "others"), APART, ids=lambda value: json.dumps(value)[:60])
def test_alternatives_that_are_told_apart_are_followed(schema: Any, fitting: list[Any], others: list[Any]) -> None:
    accepts = Accepts(schema)
    for value in fitting + others:
        assert accepts(json.dumps(value)) == (value in fitting), value
        assert value in others or jsonschema.Draft202012Validator(schema).is_valid(value), value


@pytest.mark.parametrize(
    "options",
    [
        [INTEGER, {"type": "number"}],
        [{"const": 1}, {"enum": [1.0, "a"]}],
        [C, {"$ref": "#/$defs/C"}],
        [C, {"type": "object"}],
        [{"properties": {"kind": {"const": each}}, "required": ["kind"]} for each in "ab"],  # a string fits both
        [tagged("a"), has("n")],
        [has("a", "b"), has("b")],  # an object with both fits both
        [{"anyOf": [tagged("a"), tagged("b")]}, tagged("c")],
        [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}],
        [True, STRING],
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_alternatives_that_a_value_may_fit_two_of_are_refused(options: list[Any]) -> None:
    said = refused({"type": "object", "properties": {"x": {"oneOf": options}}, "$defs": DEFS | {"loop": {"$ref": "#/$defs/loop"}}})
    assert "'oneOf'" in said and "use 'anyOf'" in said and said.endswith("(at #/properties/x)") and "coerce" not in said


def test_definitions_mean_the_same_elsewhere() -> None:
    one_of = {"oneOf": [C, D]}
    accepts = Accepts(
        {"type": "object", "properties": {"x": one_of, "y": C}, "$defs": {"C": tagged("c", n=INTEGER), "D": tagged("d")}}
    )
    assert accepts('{"x": {"kind": "c", "n": 1}, "y": {"n": 1}}') and not accepts('{"x": {"n": 1}}')


def test_what_is_no_schema_is_left_alone() -> None:
    parts = {"discriminator": INTEGER, "format": "x"}
    assert Accepts({"$ref": "#/parts/discriminator", "parts": parts})("1")
    accepts = Accepts({"type": "object", "properties": {"discriminator": INTEGER, "oneOf": STRING, "format": STRING}})
    assert accepts('{"discriminator": 1, "oneOf": "a", "format": "b"}')
    assert Accepts({"const": {"oneOf": [1, 1], "format": "x"}})('{"oneOf": [1, 1], "format": "x"}')


def test_schemas_that_are_followed_as_far_as_can_be_may_overlap() -> None:
    schema = {"oneOf": [has("a", "b"), has("b"), C, D], "discriminator": {"propertyName": "kind"}, "$defs": DEFS}
    assert refused(schema)
    GRAMMARS.compile(Grammar("llguidance", json.dumps({"grammars": [{"name": "x", "json_schema": schema}]})))


def test_many_alternatives_are_told_apart_in_time_or_refused() -> None:
    assert not refused(
        {"oneOf": [{"$ref": f"#/$defs/{each}"} for each in range(400)], "$defs": {each: tagged(each) for each in range(400)}}
    )
    # Each of them is compared with each other.
    assert "use 'anyOf'" in refused({"oneOf": [has(f"x{each}") for each in range(700)]})
    # Each takes another copy of a large definition.
    many = {"type": "object", "properties": {f"x{each}": {"const": 1} for each in range(9)}, "title": "x" * 9000}
    others = [{"type": "object", "properties": {f"x{each}": {"const": 2}}} for each in range(9)]
    assert "'x7' and do not require it" in refused({"anyOf": [{"oneOf": [C, each]} for each in others], "$defs": {"C": many}})


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


class Fish(BaseModel):
    kind: Literal["fish"] = "fish"
    name: str


class Leaf(BaseModel):
    op: Literal["leaf"] = "leaf"
    value: int


class Add(BaseModel):
    op: Literal["add"] = "add"
    left: Expr
    right: Expr


class Black(BaseModel):
    kind: Literal["cat"]
    color: Literal["black"] = "black"


class White(BaseModel):
    kind: Literal["cat"]
    color: Literal["white"] = "white"


Expr = Annotated[Leaf | Add, Field(discriminator="op")]
Add.model_rebuild()
Pet = Annotated[Cat | Dog | Fish, Field(discriminator="kind")]
Nested = Annotated[Annotated[Black | White, Field(discriminator="color")] | Fish, Field(discriminator="kind")]


class Holder(BaseModel):
    pet: Pet
    other: Pet | None = None
    expressions: list[Expr]


LEAF = {"op": "leaf", "value": 1}


@pytest.mark.parametrize("with_discriminator", [True, False])
@pytest.mark.parametrize(
    ("model", "fitting", "others"),
    [
        (
            Pet,
            [{"kind": "cat", "lives": 9}, {"kind": "dog", "name": "a"}, {"kind": "fish", "name": "a"}],
            [{"name": "a"}, {"kind": "cat", "name": "a"}, {"kind": "cow", "name": "a"}, {"kind": "dog"}],
        ),
        (
            Expr,
            [LEAF, {"op": "add", "left": LEAF, "right": {"op": "add", "left": LEAF, "right": LEAF}}],
            [{"op": "add"}, {"value": 1}],
        ),
        (Add, [{"op": "add", "left": LEAF, "right": LEAF}], [LEAF, {"op": "add", "left": LEAF, "right": {"value": 1}}]),
        (
            Nested,
            [{"kind": "cat", "color": "black"}, {"kind": "cat", "color": "white"}, {"kind": "fish", "name": "a"}],
            [{"kind": "cat"}, {"kind": "cat", "color": "red"}, {"kind": "fish", "color": "black"}],
        ),
        (
            Holder,
            [
                {"pet": {"kind": "cat", "lives": 9}, "other": None, "expressions": []},
                {"pet": {"kind": "dog", "name": "a"}, "other": {"kind": "fish", "name": "b"}, "expressions": [LEAF]},
            ],
            [{"pet": None, "expressions": []}, {"pet": {"kind": "cat", "lives": 9}, "expressions": [{"value": 1}]}],
        ),
    ],
    ids=["tags", "recursive", "recursive model", "nested", "within a model"],
)
def test_models_are_written_as_pydantic_tells_them_apart(
    model: Any, fitting: list[Any], others: list[Any], with_discriminator: bool
) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(model)
    schema = adapter.json_schema()
    assert "discriminator" in json.dumps(schema)
    accepts = Accepts(schema if with_discriminator else without_discriminator(schema))
    for value in fitting:
        assert accepts(json.dumps(value)) and adapter.validate_python(value), value
    for value in others:
        assert not accepts(json.dumps(value)), value
        with pytest.raises(ValidationError):
            adapter.validate_python(value)


def without_discriminator(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key: without_discriminator(value) for key, value in schema.items() if key != "discriminator"}
    return [without_discriminator(each) for each in schema] if isinstance(schema, list) else schema


VALUES = ["a", "b", 1, 1.0, True, None, [1], [True]]


def drawn_object(random: Random) -> dict[str, Any]:
    """A schema of objects with a few of p, q, r, which are mostly tags."""
    forms = [
        {"const": random.choice(VALUES)},
        {"const": random.choice(VALUES)},
        {"enum": random.sample(VALUES, 2)},
        INTEGER,
        STRING,
    ]
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: random.choice(forms) for name in random.sample("pqr", random.choice([1, 2, 2, 3]))},
    }
    if random.random() < 0.5:
        schema["required"] = random.sample(list(schema["properties"]), 1)
    if random.random() < 0.3:
        schema["additionalProperties"] = random.choice([True, False, INTEGER])
    if random.random() < 0.05:
        del schema["type"]
    return schema


def drawn(random: Random, depth: int = 2) -> dict[str, Any]:
    """One that others are combined to."""
    if depth == 0 or random.random() < 0.6:
        return drawn_object(random)
    options = [drawn(random, depth - 1) for _ in range(2)]
    return random.choice(
        [{"$ref": f"#/$defs/{random.choice('XY')}"}, {"oneOf": options}, {"anyOf": options}, {"allOf": options[:1]}]
    )


@pytest.mark.parametrize("seed", range(3))
def test_what_is_followed_fits_the_schema(seed: int) -> None:
    random = Random(seed)
    objects = [{name: random.choice(VALUES) for name in "pqrs" if random.random() < 0.5} for _ in range(30)]
    num_followed = num_accepted = 0
    for _ in range(60):
        schema = {"oneOf": [drawn(random), drawn(random)], "$defs": {name: drawn_object(random) for name in "XY"}}
        if refused(schema):
            continue
        num_followed += 1
        accepts, validator = Accepts(schema), jsonschema.Draft202012Validator(schema)
        for value in objects:
            names = list(value)
            random.shuffle(names)  # the grammar has them in one order
            for text in {json.dumps(value), json.dumps({name: value[name] for name in names})}:
                if accepts(text):
                    num_accepted += 1
                    assert validator.is_valid(value), (schema, value)
    assert num_followed > 10 and num_accepted > 20


@pytest.mark.parametrize("form", ["password", "binary", "byte", "url", "phone", "color", "ipvanyaddress", "unknown"])
def test_formats_of_ones_own_are_remarks(form: str) -> None:
    accepts = Accepts(
        {"type": "object", "properties": {"a": {"type": "string", "format": form, "minLength": 1}}, "required": ["a"]}
    )
    assert accepts('{"a": "any text"}') and not accepts('{"a": ""}') and not accepts('{"a": 1}')


@pytest.mark.parametrize(
    "form",
    [
        *("regex", "iri", "iri-reference", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
        *("idn-email", "idn-hostname"),
    ],
)
def test_formats_that_are_not_kept_are_refused(form: str) -> None:
    said = refused({"type": "object", "properties": {"a": {"type": ["string", "null"], "format": form}}})
    assert f"'{form}'" in said and "leave it out" in said and "'pattern'" in said and said.endswith("(at #/properties/a)")
    assert not refused({"type": "integer", "format": form})
