"""Grammars in llguidance's words, no larger than it is done with in time; and what it says of those that it does not take."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from speculative.json_places import Schema
from speculative.json_refusals import LONGEST_PATTERN
from speculative.json_schema import outline, place_of, prepared
from speculative.request import Grammar

LONGEST = {"json_schema": 2**16, "regex": LONGEST_PATTERN, "lark": 2**13, "llguidance": 2**18}
"""Characters of a grammar: what may be left out, side by side, takes time and memory that grow with the square of its number."""

LONGEST_RULES = 2**15
"""Characters of the rules of several grammars, which are as many as there are tools."""

MOST_TOGETHER = 8
"""Regular expressions that one text is to fit: their states multiply."""


def source_of(grammar: Grammar) -> str:
    """A grammar in llguidance's words; raises ValueError for what is none, or too large."""
    if (length := len(grammar.source)) > (most := LONGEST[grammar.kind]):
        raise ValueError(f"it has {length} characters, and at most {most} are compiled")
    try:
        return _source(grammar)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def reason(grammar: Grammar, message: str) -> str:
    """What llguidance says of a grammar, in one line without the grammar around it; of a schema with the place, if that is told."""
    said = _in_a_line(message)
    return said + (place_of(json.loads(grammar.source), said) if grammar.kind == "json_schema" else "")


def _source(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(json.dumps(prepared(_parsed(grammar.source))))
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "lark":
            return LLMatcher.grammar_from_lark(_lark(grammar.source))
        case "llguidance":
            return json.dumps({"grammars": _parts(_parsed(grammar.source))})


def _parts(several: Any) -> list[dict[str, Any]]:
    """Several grammars in llguidance's words: of their schemas what cannot be kept is passed over."""
    try:
        if (length := sum(len(part.get("lark_grammar", "")) for part in several["grammars"])) > LONGEST_RULES:
            raise ValueError(f"its rules have {length} characters, and at most {LONGEST_RULES} are compiled")
        return [
            part | {"json_schema": _as_far_as_possible(part["json_schema"])}
            if "json_schema" in part
            else part | {"lark_grammar": _lark(part["lark_grammar"])}
            for part in several["grammars"]
        ]
    except (AttributeError, KeyError, TypeError):
        raise ValueError('it must be {"grammars": [{"name": …, "lark_grammar": …}, {"name": …, "json_schema": …}]}') from None


def _as_far_as_possible(schema: Any) -> Schema:
    """A schema without what llguidance passes over; its outline where it does not take that; or else any object's."""
    for some in (schema, outline(schema)):
        with contextlib.suppress(ValueError):
            made = prepared(some, lenient=True)
            if not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(made))):
                return made
    return prepared({"type": "object"}, lenient=True)


def _lark(source: str) -> str:
    if len(re.findall("&", re.sub(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/', "", source))) > MOST_TOGETHER:
        raise ValueError(f"at most {MOST_TOGETHER} terminals may hold together (&)")
    try:
        converted: str = any_to_lark(source)
    except Exception as error:  # of several kinds
        raise ValueError(f"it is neither Lark nor GBNF: {error}") from None
    return converted


def _parsed(source: str) -> Any:
    try:
        return json.loads(source)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None


def _in_a_line(message: str) -> str:
    message = message.partition("<state>")[0]
    if message.startswith("NoExtension"):
        return "no text could follow it"
    if message.startswith("panic"):
        return "it cannot be compiled"
    lines = [line.strip() for line in message.splitlines()]
    told = " ".join(line for line in lines if line.strip("^ ") and not re.match(r"\d+ \|", line))
    if keys := re.fullmatch(r"Unimplemented keys: \[(.*)\]", told):
        return keys[1].replace('"', "'") + (" are not supported" if "," in keys[1] else " is not supported")
    return re.sub(r"^at \d+\(\d+\): invalid regex .* \(in regex\): ", "", told)
