"""Conversations whose tools go by other names.

A corpus has few tools, and a target that sees them often knows by heart what their arguments are called; of a tool that it has
never seen it then gives those of one that it has. Where the same tool goes by many names, what it is given is what counts.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from training.errors import DataError
from training.example import Example

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

_SHARE_KEPT = 0.3
"""Of names that stay as they are."""

_ADDED = ("the", "my", "which", "name", "value", "choice", "wanted", "given")

_TRIES = 20
"""To find a name that no other has, before it stays what it was."""


_Style = Callable[[list[str]], str]


def _snake(words: list[str]) -> str:
    return "_".join(words)


def _pascal(words: list[str]) -> str:
    return "".join(word.capitalize() for word in words)


def _camel(words: list[str]) -> str:
    return "".join(words[:1]) + _pascal(words[1:])


_PARAMETER_STYLES: tuple[_Style, ...] = (_snake, _snake, _camel)
_FUNCTION_STYLES: tuple[_Style, ...] = (_pascal, _snake, _camel)


def with_other_names(examples: Iterable[Example], variants: int, seed: int) -> Iterator[Example]:
    """Every conversation, and behind each that has tools ``variants`` others in which those go by other names.

    Raises DataError where tools or calls are not such as chat templates take.
    """
    for number, example in enumerate(examples):
        yield example
        for variant in range(variants if example.tools else 0):
            try:
                yield renamed(example, random.Random(f"{seed} {number} {variant}"))
            except (KeyError, TypeError, AttributeError) as error:
                raise DataError(f"{example.source}: its tools or calls cannot be given other names: {error!r}") from error


def renamed(example: Example, chance: random.Random) -> Example:
    """The conversation with other names for its functions and their parameters: in tools, calls and what tools answer.

    A parameter that several functions share has one new name, as their answers may mix. Nested parameters keep theirs.
    """
    functions = [tool["function"] for tool in example.tools or () if isinstance(tool.get("function"), dict)]
    called = _new_names((function["name"] for function in functions), (), _FUNCTION_STYLES, chance)
    answered = (key for message in example.messages if message["role"] == "tool" for key in _keys(message.get("content") or ""))
    given = _new_names((name for function in functions for name in _properties(function)), answered, _PARAMETER_STYLES, chance)
    tools = [_renamed_tool(tool, called, given) for tool in example.tools or ()]
    messages = [_renamed_message(message, called, given) for message in example.messages]
    return Example(example.source, messages, tools or None)


def _properties(function: dict[str, Any]) -> dict[str, Any]:
    properties = (function.get("parameters") or {}).get("properties")
    return properties if isinstance(properties, dict) else {}


def _keys(text: str) -> Iterator[str]:
    """Those of a JSON object, or of a list of them."""
    try:
        value = json.loads(text)
    except ValueError:
        return
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, dict):
            yield from each


def _new_names(names: Iterable[str], others: Iterable[str], styles: tuple[_Style, ...], chance: random.Random) -> dict[str, str]:
    """Each name's new one, all of them different from one another, from the old ones and from ``others``."""
    old = list(dict.fromkeys(names))
    style, taken, new = chance.choice(styles), {*old, *others}, dict[str, str]()
    for name in old:
        tries = (style(_other_words(name, chance)) for _ in range(_TRIES if chance.random() >= _SHARE_KEPT else 0))
        new[name] = next((each for each in tries if each and each not in taken), name)
        taken.add(new[name])
    return new


def _other_words(name: str, chance: random.Random) -> list[str]:
    """The words of a name with one of them left out, in another order, or with one more."""
    words = [word.lower() for word in _WORD.findall(name)]
    if len(words) > 1 and chance.random() < 0.4:
        words.pop(chance.randrange(len(words)))
    if len(words) > 1 and chance.random() < 0.3:
        words.append(words.pop(0))
    if chance.random() < 0.4:
        words.insert(chance.choice((0, len(words))), chance.choice(_ADDED))
    return words


def _renamed_tool(tool: dict[str, Any], called: dict[str, str], given: dict[str, str]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    function = {**function, "name": called[function["name"]]}
    if properties := _properties(function):
        parameters = {**function["parameters"], "properties": {given[name]: each for name, each in properties.items()}}
        if isinstance(required := parameters.get("required"), list):
            parameters["required"] = [given.get(name, name) for name in required]
        function["parameters"] = parameters
    return {**tool, "function": function}


def _renamed_message(message: dict[str, Any], called: dict[str, str], given: dict[str, str]) -> dict[str, Any]:
    message = dict(message)
    if message.get("tool_calls"):
        message["tool_calls"] = [_renamed_call(call, called, given) for call in message["tool_calls"]]
    if message["role"] == "tool":
        if message.get("content"):
            message["content"] = _renamed_json(message["content"], given)
        if "name" in message:
            message["name"] = called.get(message["name"], message["name"])
    return message


def _renamed_call(call: dict[str, Any], called: dict[str, str], given: dict[str, str]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    new = _renamed_json(arguments, given) if isinstance(arguments, str) else _renamed_keys(arguments, given)
    return {**call, "function": {**function, "name": called.get(function["name"], function["name"]), "arguments": new}}


def _renamed_json(text: str, given: dict[str, str]) -> str:
    """A JSON object, or a list of them, with other keys; what is none stays as it is."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    if isinstance(value, dict):
        value = _renamed_keys(value, given)
    elif isinstance(value, list) and all(isinstance(each, dict) for each in value):
        value = [_renamed_keys(each, given) for each in value]
    else:
        return text
    return json.dumps(value, ensure_ascii=text.isascii())


def _renamed_keys(value: dict[str, Any], given: dict[str, str]) -> dict[str, Any]:
    """With other keys; where they stood in alphabetical order they do so again."""
    renamed = {given.get(key, key): each for key, each in value.items()}
    return dict(sorted(renamed.items())) if list(value) == sorted(value) else renamed
