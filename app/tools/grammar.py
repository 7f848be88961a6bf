"""What a request's tools allow the model to write, as an xgrammar structural tag.

https://xgrammar.mlc.ai/docs/structural_tag/structural_tag_api describes the language.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from app.tools.formats import Format
from app.tools.schemas import Tool, ToolChoice
from speculative.request import Grammar

Node = dict[str, Any]


def tool_grammar(
    tools: Sequence[Tool], choice: ToolChoice, parallel: bool, format: Format, form: Grammar | None = None
) -> Grammar | None:
    """The grammar that the answer must follow; None where it may be anything. Without a call the answer has the caller's ``form``.

    Forced calls are nothing but calls, whose arguments follow their tool's schema: exactly one where the choice names a tool or
    calls are not to be ``parallel``, else any number. Where the model may choose, arguments follow the schema of strict tools, and
    else are any object. It also writes what it likes around calls; where these need no opener, it calls or writes a text. No text
    holds what `ToolParser` would take for a call.
    """
    assert not (form and choice.forced)
    if choice.function is not None:
        (tool,) = (tool for tool in tools if tool.function.name == choice.function.name)
        return _structural_tag(_call(tool, format))
    if choice.forced:
        return _structural_tag(_calls([_call(tool, format) for tool in tools], parallel, format))
    if parallel and form is None and not any(tool.function.strict for tool in tools):
        return None
    calls = [_call(tool, format, follow=bool(tool.function.strict)) for tool in tools]
    if format.bare or form is not None:
        called = _calls(calls, parallel, format)
        if format.bare:
            opener = {"type": "optional", "content": {"type": "const_string", "value": format.opener}}
            called = {"type": "sequence", "elements": [opener, called]}
        other = _text(format) if form is None else _form(form)
        return _structural_tag({"type": "or", "elements": [called, other]})
    # The opener alone, and not all of `begin`: another key, or white space, would lead past that.
    return _structural_tag({"type": "triggered_tags", "triggers": [format.opener], "tags": calls, "stop_after_first": not parallel})


_SPACE = r"\s\x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""All that `str.isspace` knows, inside of a set of a regular expression."""


def _text(format: Format) -> Node:
    """Text without a call, where calls need no opener: it does not begin with a brace, and has no opener anywhere."""
    mark = re.escape(format.opener[0])
    # An opener that begins within the first pattern would go unnoticed by the second one.
    begun = {"type": "regex", "pattern": rf"\s*([^{_SPACE}{{{mark}]|{mark}+[^{mark}{re.escape(format.opener[1])}])"}
    rest = {"type": "any_text", "excludes": [format.opener]}
    empty = {"type": "regex", "pattern": rf"\s*{mark}*"}
    return {"type": "or", "elements": [empty, {"type": "sequence", "elements": [begun, rest]}]}


def _structural_tag(format: Node) -> Grammar:
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": format}))


def _json(schema: Any) -> Node:
    return {"type": "json_schema", "json_schema": schema}


def _form(grammar: Grammar) -> Node:
    match grammar.kind:
        case "json_schema":
            return _json(json.loads(grammar.source))
        case "regex":
            return {"type": "regex", "pattern": grammar.source}
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.source}
        case "structural_tag":
            return dict(json.loads(grammar.source)["format"])


def _call(tool: Tool, format: Format, *, follow: bool = True) -> Node:
    """One call of ``tool``; its arguments ``follow`` its schema, or are any object."""
    schema: dict[str, Any] = tool.function.schema_of_arguments if follow else {"type": "object"}
    if format.by_name and isinstance(schema.get("properties"), dict):
        schema = schema | {"properties": dict(sorted(schema["properties"].items()))}
    arguments = _json(schema)
    return {"type": "tag", "begin": format.begin.format(name=tool.function.name), "content": arguments, "end": format.end}


def _calls(calls: Sequence[Node], parallel: bool, format: Format) -> Node:
    """A call or, if ``parallel``, more of them."""
    one = {"type": "or", "elements": list(calls)}
    if not parallel:
        return one
    separator = {"type": "const_string", "value": format.separator}
    between = {"type": "optional", "content": separator} if format.closer else separator
    more = {"type": "star", "content": {"type": "sequence", "elements": [between, one]}}
    return {"type": "sequence", "elements": [one, more]}
