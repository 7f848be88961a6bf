"""What a request's tools allow the model to write, as an xgrammar structural tag.

https://xgrammar.mlc.ai/docs/structural_tag/structural_tag_api describes the language.
"""

from __future__ import annotations

import json
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
    calls are not to be ``parallel``, else any number. Where the model may choose, it also writes what it likes around calls; their
    arguments follow the schema of strict tools, and else are any object.
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
    if form is not None:
        return _structural_tag({"type": "or", "elements": [_calls(calls, parallel, format), _form(form)]})
    return _structural_tag(
        {
            "type": "triggered_tags",
            "triggers": [format.begin.partition("{name}")[0].format()],
            "tags": calls,
            "stop_after_first": not parallel,
        }
    )


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
    arguments = _json(tool.function.schema_of_arguments if follow else {"type": "object"})
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
