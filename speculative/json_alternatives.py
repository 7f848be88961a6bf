"""Alternatives of JSON schemas: where no value fits two of them, ``oneOf`` is ``anyOf``, which llguidance knows.

It tells alternatives apart by itself, but not those that references lead to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any, TypeAlias

from speculative.json_places import Schema, changed, moved, target

MOST_STEPS = 2**15
"""Schemas that are looked at to tell others apart, each counted whenever it is: so many take 0.3 s."""

MOST_COPIED = 2**16
"""Characters of the definitions that are copied, as many as a schema may have."""

_MOST_NESTED = 4
"""Objects in objects by which others are told apart."""

_Values: TypeAlias = frozenset[Any]
_Reach: TypeAlias = dict[str, _Values | None]
"""Of which types a value may be, and which values of each; None where that may be any. 1 and 1.0 are of one type."""

_LISTED = "oneOf/0/anyOf"
"""Where alternatives are found once no value fits two. There may be an ``anyOf`` beside them."""


class Alternatives:
    """Writes the alternatives of one schema as llguidance takes them, and collects the definitions that this needs.

    If ``closed``, objects are written with no properties but those that their schema names, unless that speaks of others. Raises
    ValueError where the definitions would be too large.
    """

    def __init__(self, root: Schema, *, closed: bool) -> None:
        self._root = root
        self._closed = closed
        self._num_steps = 0
        self._copied = 0
        self._copies: list[tuple[str, Schema, str]] = []
        self._names: dict[tuple[int, str], str] = {}

    def made(self, made: Schema, schema: Schema) -> tuple[Schema, bool]:
        """``made``, which is ``schema`` with what is in it changed, without ``oneOf`` of several; and whether no value fits two."""
        if "propertyName" in _mapping(schema, "discriminator"):
            # OpenAPI's remark, by which llguidance would no longer follow references beside it that lead in a circle.
            made = {key: value for key, value in made.items() if key != "discriminator"}
        if isinstance(reference := made.get("$ref"), str):
            made = made | {"$ref": moved(reference, self._root, "oneOf", _LISTED)}
        options = schema.get("oneOf")
        if not isinstance(options, list) or not options:
            return made, True
        beside = {key: value for key, value in schema.items() if key != "oneOf"}
        tag = self._told_apart(options, beside)
        alternatives = made["oneOf"]
        if tag and not self._requires(beside, tag):
            alternatives = [self._requiring(*each, tag) for each in zip(alternatives, options, strict=True)]
        return made | {"oneOf": [{"anyOf": alternatives}]}, tag is not None

    def with_copies(self, made: Schema, change: Callable[[Schema, Schema], Schema]) -> Schema:
        """The whole schema, which has been ``made``, with the definitions that its alternatives need, and all in these changed."""
        # Those that are copied may need more, which come to stand at the list's end.
        copies = {name: self._requiring(changed(schema, change), schema, tag) for name, schema, tag in self._copies}
        return made | {"$defs": _mapping(made, "$defs") | copies} if copies else made

    def _told_apart(self, options: Sequence[Any], beside: Schema) -> str | None:
        """The property that tells alternatives apart, "" if it takes none; None if a value may fit two, as far as is known."""
        whole: list[Schema] = [{"allOf": [each, beside]} for each in options]
        reaches = [self._reach(each) for each in whole]
        if _are_apart(reaches):
            return ""
        if not _are_apart(map(_without_objects, reaches)):
            return None
        objects = [number for number, each in enumerate(reaches) if "object" in each]
        lacking: dict[str, list[Any]] = {}
        for name in dict.fromkeys(self._named("properties", whole[objects[0]])):
            if self._is_tag(name, [whole[number] for number in objects]):
                those = [options[number] for number in objects if not self._requires(whole[number], name)]
                if all(self._may_require(each, name) for each in those):
                    lacking[name] = those
        if lacking:
            best = _mapping(beside, "discriminator").get("propertyName")
            return min(lacking, key=lambda name: (name != best, len(lacking[name])))
        pairs = combinations([whole[number] for number in objects], 2)
        return "" if all(self._excludes(one, other) and self._excludes(other, one) for one, other in pairs) else None

    def _is_tag(self, name: str, schemas: Sequence[Schema]) -> bool:
        """Whether objects with this property fit one of the schemas at most, as each lists other values."""
        return _are_apart((self._reach(self._property(each, name)) for each in schemas), listed=True)

    def _excludes(self, schema: Any, other: Any, nested: int = 0) -> bool:
        """Whether what is written for ``schema`` is known not to fit ``other``."""
        reaches = [self._reach(schema), self._reach(other)]
        if _are_apart(reaches):
            return True
        if nested == _MOST_NESTED or not _are_apart(map(_without_objects, reaches)):
            return False
        names = dict.fromkeys([*self._named("required", schema), *self._named("required", other)])
        return any(
            (self._requires(schema, name) or self._requires(other, name))
            and self._excludes(self._property(schema, name, written=True), self._property(other, name), nested + 1)
            for name in names
        )

    def _reach(self, schema: Any, seen: tuple[str, ...] = ()) -> _Reach:
        """What values of a schema may be; some that it excludes, too."""
        if not isinstance(schema, dict):
            return {} if schema is False else _ANYTHING
        types = schema.get("type")
        types = [types] if isinstance(types, str) else types
        reach = _ANYTHING
        if isinstance(types, list) and all(isinstance(each, str) and each in _TYPES for each in types):
            reach = _either(_TYPES[each] for each in types)
        for listed in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
            if isinstance(listed, list):
                reach = _both(reach, _either(_only(each) for each in listed))
        for options, since in self._applied(schema, seen):
            reach = _both(reach, _either(self._reach(each, since) for each in options))
        return reach

    def _property(self, schema: Any, name: str, seen: tuple[str, ...] = (), *, written: bool = False) -> Any:
        """What a property must fit, if an object has it; as it is ``written``, or as the schema says."""
        if not isinstance(schema, dict):
            return True
        parts = []
        if name in (named := _mapping(schema, "properties")):
            parts.append(named[name])
        elif "patternProperties" not in schema and "additionalProperties" in schema:
            parts.append(schema["additionalProperties"])
        elif written and self._closed and named and schema.keys().isdisjoint({"patternProperties", "unevaluatedProperties"}):
            parts.append(False)
        for options, since in self._applied(schema, seen):
            parts.append({"anyOf": [self._property(each, name, since, written=written) for each in options]})
        return {"allOf": parts}

    def _requires(self, schema: Any, name: str, seen: tuple[str, ...] = ()) -> bool:
        """Whether all objects of a schema are known to have a property."""
        return isinstance(schema, dict) and (
            name in _listed(schema, "required")
            or any(all(self._requires(each, name, since) for each in options) for options, since in self._applied(schema, seen))
        )

    def _named(self, keyword: str, schema: Any, seen: tuple[str, ...] = ()) -> Iterator[str]:
        """The names that a schema has by ``properties`` or ``required``, as one of several that it is made of."""
        if isinstance(schema, dict):
            own = _mapping(schema, keyword) or _listed(schema, keyword)
            yield from (name for name in own if isinstance(name, str))
            for options, since in self._applied(schema, seen):
                for each in options:
                    yield from self._named(keyword, each, since)

    def _applied(self, schema: Schema, seen: tuple[str, ...]) -> Iterator[tuple[list[Any], tuple[str, ...]]]:
        """Schemas of which a value of this one fits one, several times; and the references that led there.

        None is told of any more where it would take too long: what is not known of a schema lets values fit it.
        """
        self._num_steps += 1
        if self._num_steps > MOST_STEPS:
            return
        if isinstance(reference := schema.get("$ref"), str) and reference not in seen:
            yield [target(reference, self._root)], (*seen, reference)
        yield from (([each], seen) for each in _listed(schema, "allOf"))
        yield from ((_listed(schema, keyword), seen) for keyword in ("anyOf", "oneOf") if _listed(schema, keyword))

    def _may_require(self, schema: Any, name: str, seen: tuple[str, ...] = ()) -> bool:
        """Whether ``_requiring`` can have a schema require a property."""
        if not isinstance(schema, dict) or self._requires(schema, name) or name in _mapping(schema, "properties"):
            return isinstance(schema, dict)
        reference = schema.get("$ref")
        return reference not in seen and self._may_require(target(reference, self._root), name, (*seen, str(reference)))

    def _requiring(self, made: Any, schema: Any, name: str) -> Any:
        """``made``, which is ``schema`` with what is in it changed, if its objects are to have a property.

        Where a reference leads to them, it leads to a copy: others that lead there are to mean the same as before.
        """
        if not self._may_require(schema, name) or self._requires(schema, name):
            return made
        if name in _mapping(schema, "properties"):
            return made | {"required": [*_listed(schema, "required"), name]}
        return made | {"$ref": f"#/$defs/{self._copy(target(schema['$ref'], self._root), name)}"}

    def _copy(self, schema: Schema, tag: str) -> str:
        if (id(schema), tag) not in self._names:
            name = f"tagged-{len(self._copies)}"
            while name in _mapping(self._root, "$defs"):
                name += "-"
            self._copied += len(json.dumps(schema, ensure_ascii=False, separators=(",", ":")))
            if self._copied > MOST_COPIED:
                raise ValueError(f"schemas of 'oneOf' lead to objects that have {tag!r} and do not require it: require it there")
            self._names[id(schema), tag] = name
            self._copies.append((name, schema, tag))
        return self._names[id(schema), tag]


def _are_apart(reaches: Iterable[_Reach], *, listed: bool = False) -> bool:
    """Whether no value is in two of them; if they are to be ``listed``, whether all their values are, too."""
    found: dict[str, set[Any] | None] = {}
    for reach in reaches:
        for kind, values in reach.items():
            if listed and values is None:
                return False
            if kind not in found:
                found[kind] = None if values is None else set(values)
            elif (known := found[kind]) is None or values is None or not known.isdisjoint(values):
                return False
            else:
                known |= values
    return True


def _without_objects(reach: _Reach) -> _Reach:
    return {kind: values for kind, values in reach.items() if kind != "object"}


def _both(one: _Reach, other: _Reach) -> _Reach:
    return {kind: _common(one[kind], other[kind]) for kind in one if kind in other}


def _common(one: _Values | None, other: _Values | None) -> _Values | None:
    return other if one is None else one if other is None else one & other


def _either(reaches: Iterable[_Reach]) -> _Reach:
    found: dict[str, set[Any] | None] = {}
    for reach in reaches:
        for kind, values in reach.items():
            known = found.setdefault(kind, set())
            if known is None or values is None:
                found[kind] = None
            else:
                known |= values
    return {kind: None if values is None else frozenset(values) for kind, values in found.items()}


def _only(value: Any) -> _Reach:
    return {(alike := _alike(value))[0]: frozenset([alike])}


def _alike(value: Any) -> tuple[str, Any]:
    """A JSON value's type and value, equal for those that JSON Schema takes for the same."""
    match value:
        case None:
            return "null", None
        case bool():
            return "boolean", value
        case int() | float():
            return "number", value
        case str():
            return "string", value
        case list():
            return "array", tuple(map(_alike, value))
        case _:
            return "object", frozenset((name, _alike(each)) for name, each in value.items())


def _listed(schema: Schema, keyword: str) -> list[Any]:
    return found if isinstance(found := schema.get(keyword), list) else []


def _mapping(schema: Schema, keyword: str) -> dict[str, Any]:
    return found if isinstance(found := schema.get(keyword), dict) else {}


_TYPES: dict[str, _Reach] = {
    **{"null": _only(None), "boolean": _either([_only(False), _only(True)])},
    **{"string": {"string": None}, "number": {"number": None}, "integer": {"number": None}},
    **{"array": {"array": None}, "object": {"object": None}},
}
_ANYTHING = _either(_TYPES.values())
