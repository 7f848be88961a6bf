"""Which patterns of a JSON schema xgrammar keeps, and what names they are found in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

import xgrammar

from speculative.json_grammar import BLOCK, LONGEST_STRING, reason, regex

_ESCAPED = ('"', "\\", *map(chr, range(0x20)))
_TOKEN = re.compile(r'\[(?:\\.|[^\]\\])*\]|"(?:\\.|[^"\\])*"')


def pattern_problem(pattern: str) -> str | None:
    """Why strings of a pattern could be no JSON, or not what it says; None where they are."""
    try:
        xgrammar.Grammar.from_regex(pattern)
        # Where xgrammar takes it as a ``Regex`` of a JSON string, it leaves out what JSON escapes, else it does not.
        text = str(xgrammar.Grammar.from_json_schema(json.dumps({"type": "string", "pattern": pattern})))
    except RuntimeError as error:
        return reason(error)
    if re.search("[$^]", _anchored(pattern)):
        return "'^' is followed at its beginning only, and '$' at its end, or that of alternatives outside of groups: leave it out"
    if "::= Regex(" in text and any(map(_too_often, re.findall(r"\{[\d,]+\}", _plain(pattern)))):
        return f"a part is repeated more than {BLOCK} times: write '.{{{BLOCK}}}.{{72}}' for '.{{200}}'"
    rules = "\n".join(line for line in text.splitlines() if re.match(r"root_\S+ ::= (?!Regex)", line))
    if any(_writes_what_json_escapes(token) for token in _TOKEN.findall(rules)):
        return (
            "a text of it could have a quote, a backslash or a control character, which JSON escapes: say which others it may have "
            r"(and write characters beyond ASCII as \uXXXX)"
        )
    return None


def _plain(pattern: str) -> str:
    """A pattern with an x for each escape and class."""
    return re.sub(r"\\.|\[\^?(?:\\.|[^\]\\])*\]", "x", pattern, flags=re.DOTALL)


def _too_often(repetition: str) -> bool:
    return any(int(count) > BLOCK for count in repetition[1:-1].split(",") if count)


def _anchored(pattern: str) -> str:
    """A pattern without the anchors that may be there: at the ends of alternatives outside of groups."""
    depth, alternatives = 0, [""]
    for character in _plain(pattern):
        depth += (character == "(") - (character == ")")
        if character == "|" and depth == 0:
            alternatives.append("")
        else:
            alternatives[-1] += character
    return "|".join(each.removeprefix("^").removesuffix("$") for each in alternatives)


def _writes_what_json_escapes(token: str) -> bool:
    """Whether a class or a literal of xgrammar's EBNF has a quote, a backslash or a control character."""
    if token.startswith('"'):
        return re.search(r'\\(["\\abefnrtv0]|x[01])', token) is not None
    # Python has its own ideas of these within a class.
    inside = token[1:-1].replace(r"\e", r"\x1b")
    plain = re.sub(r"\\.|[\[&~|]", lambda each: each[0] if each[0][1:] else rf"\{each[0]}", inside)
    return any(re.fullmatch(f"[{plain}]", character) for character in _ESCAPED)


def names_found(pattern: str, names: Sequence[str]) -> Iterator[str]:
    """The names that a pattern is found in, and some more that it might be. Python's own search may take forever."""
    if not names:
        return
    plain = _plain(pattern)
    begins, ends = plain.startswith("^") and "|" not in plain, plain.endswith("$") and "|" not in plain
    inside = f"({pattern[begins : len(pattern) - ends]})"
    rule = regex(("" if begins else r"[\s\S]*") + inside + ("" if ends else r"[\s\S]*"))
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(["<end>"], stop_token_ids=[0]), max_threads=1)
    try:
        compiled = compiler.compile_grammar(f"root ::= {rule}")
    except RuntimeError:  # it cannot be told
        yield from names
        return
    for name in names:
        matcher = xgrammar.GrammarMatcher(compiled)
        if len(name) > LONGEST_STRING or (matcher.accept_string(name) and matcher.is_completed()):
            yield name
