"""What a request's tools allow the model to write, as grammars for llguidance that name one another.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md describes the language.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from llguidance import regex_to_lark

from app.tools.formats import Format
from app.tools.schemas import Tool, ToolChoice
from speculative.request import Grammar

Part = dict[str, Any]


def tool_grammar(
    tools: Sequence[Tool], choice: ToolChoice, parallel: bool, format: Format, form: Grammar | None = None
) -> Grammar | None:
    """The grammar that the answer must follow; None where it may be anything. Without a call the answer has the caller's ``form``.

    Calls are of the tools that the choice leaves. Forced calls are nothing but calls, whose arguments follow their tool's schema:
    exactly one where the choice names a tool or calls are not to be ``parallel``, else any number. Where the model may choose,
    arguments follow the schema of tools that say so, and else are any object. It also writes what it likes around calls; where
    these need no opener, it calls or writes a text. No text holds what `ToolParser` would take for a call.
    """
    assert not (form and choice.forced)
    called = choice.among(tools)
    separator = json.dumps(format.separator) + ("?" if format.closer else "")
    calls = f"call ({separator} call)*" if parallel else "call"
    if choice.function is not None:
        return _grammar("call", called, format)
    if choice.forced:
        return _grammar(calls, called, format)
    if parallel and form is None and choice.names is None and not any(tool.function.follows_schema for tool in tools):
        return None
    if format.bare or form is not None:
        start = f"{'opener? ' if format.bare else ''}{calls} | {'TEXT' if form is None else '@form'}"
    else:
        start = "(text_and_opener body)* TEXT" if parallel else "text_and_opener body | TEXT"
    return _grammar(start, called, format, form, free=True)


def _grammar(start: str, tools: Sequence[Tool], format: Format, form: Grammar | None = None, *, free: bool = False) -> Grammar:
    """``start`` with what it may name. Where arguments are ``free``, only those of tools that say so follow their schema."""
    lines = [
        f"start: {start}",
        f"call: {'' if format.bare else 'opener'} body",
        "body: " + " | ".join(f"tool_{place}" for place in range(len(tools))),
        _mark("opener", format.opener, form),
        f"text_and_opener[lazy]: ANY {json.dumps(format.opener)}",
        f"TEXT: ANY & ~(ANY {json.dumps(format.opener)} ANY)" + (r" & ~/[\s\x1c-\x1f]*\{(?s:.*)/" if format.bare else ""),
        "ANY: /(?s:.*)/",
    ]
    parts: list[Part] = [] if form is None else named("form", form)
    for place, tool in enumerate(tools):
        begin = format.begin.format(name=tool.function.name).removeprefix(format.opener)
        lines.append(_mark(f"begin_{place}", begin, form))
        lines.append(f"tool_{place}: begin_{place} @arguments_{place} {json.dumps(format.end)}")
        schema = _arguments(tool, format, follow=not free or tool.function.follows_schema)
        parts.append({"name": f"arguments_{place}", "json_schema": schema})
    return Grammar("llguidance", json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, *parts]}))


def _mark(name: str, text: str, form: Grammar | None) -> str:
    """A rule for a text that calls begin with, as may a text that is none.

    llguidance reads on while any terminal that may come goes on, and back to none that was complete before. So this is cut as the
    other is: any text and a regular expression are one terminal, and ``form``s of other kinds have one for each word or sign.
    """
    if form is None or form.kind == "regex":
        return f"{name}[lazy]: {json.dumps(text)}"
    return f"{name}: " + " ".join(map(json.dumps, re.findall(r'"[^"]*"|\w+|[:,] |\W', text)))


def _arguments(tool: Tool, format: Format, *, follow: bool) -> Part:
    """The schema of a call's arguments: the tool's if they are to ``follow`` it, or any object's."""
    schema: Part = tool.function.schema_of_arguments if follow else {"type": "object"}
    if format.by_name and isinstance(schema.get("properties"), dict):
        return schema | {"properties": dict(sorted(schema["properties"].items()))}
    return schema


def named(name: str, grammar: Grammar) -> list[Part]:
    """A grammar as a part of another, which knows it by ``name``, and the parts that it has itself."""
    match grammar.kind:
        case "json_schema":
            return [{"name": name, "json_schema": json.loads(grammar.source)}]
        case "regex":
            return [{"name": name, "lark_grammar": f"start: /{regex_to_lark(grammar.source, '')}/"}]
        case "lark":
            return [{"name": name, "lark_grammar": grammar.source}]
        case "llguidance":
            whole, *parts = json.loads(grammar.source)["grammars"]
            return [{"name": name} | whole, *parts]
