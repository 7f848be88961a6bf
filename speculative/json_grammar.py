"""The grammar of a JSON schema: xgrammar's own, but for two rules by which a text could be no JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import xgrammar

LONGEST_STRING = 2**8
"""Characters from where on a longer string takes hardly longer to compile."""

_RAW = r"[^\"\\\r\n]"
"""One character of a counted string as xgrammar writes it: a tab as it is, and none that must be escaped."""

_CHARACTER = r'([^\x00-\x1f"\\]|\\["\\/bfnrt])'
"""And as JSON has it, without ``\\uXXXX``: compiling would take a third longer, and only control characters need it."""

BLOCK = 2**7
"""Of so many repetitions xgrammar makes states, whose tokens it knows when it is compiled; more are counted while it writes."""

_PAIR = ('"\\\\" [ -~]', r'"\\\\" "\\" [\"\\]')
"""A backslash in a quoted part of an email address, which xgrammar lets come before any letter, and as JSON has it."""


def grammar(schema: Any) -> str:
    """The EBNF of the texts that fit ``schema``, with one way to write a value: json.dumps's. Raises what xgrammar does."""
    text = str(xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False)).replace(*_PAIR)
    rules: dict[str, str] = {}

    def counted(match: re.Match[str]) -> str:
        name = f"json_string_{match[1]}_{match[2].removeprefix('-')}"  # strings of the same lengths are compiled once
        rules[name] = rf'"\"" {_repeated(int(match[1]), int(match[2]))} "\""'
        return name

    text = re.sub(r'"\\"" \S+_characters\S*?\{(\d+), (-?\d+)\} "\\""', counted, text)
    rules |= {"json_characters": regex(_CHARACTER + f"{{{BLOCK}}}"), "json_character": regex(_CHARACTER)}
    return text.replace(_RAW, "json_character") + "".join(f"{name} ::= {rule}\n" for name, rule in rules.items())


def _repeated(least: int, most: int) -> str:
    """So many characters of a string; ``most`` is −1 for any number of them."""
    blocks = [0, 0]
    if most < 0 and least > LONGEST_STRING:
        blocks = [least // BLOCK] * 2
    elif most > LONGEST_STRING:
        first = least // BLOCK
        # What is left over is at least one block wide, so that no length between is left out.
        blocks = [first, max(first, (most - least % BLOCK - BLOCK + 1) // BLOCK)]
    least, most = least - blocks[0] * BLOCK, most - blocks[1] * BLOCK if most >= 0 else most
    left = regex("".join(_pieces(least, most)))
    return f"json_characters{{{blocks[0]}, {blocks[1]}}} {left}" if blocks[1] else left


def _pieces(least: int, most: int) -> Iterator[str]:
    """Repetitions of a character, each of no more than a block."""
    while least > 0:
        each = min(least, BLOCK)
        least, most = least - each, most - each if most >= 0 else most
        yield f"{_CHARACTER}{{{each}}}"
    more = most - BLOCK
    if most < 0:
        yield f"{_CHARACTER}*"
    elif more > 0:
        yield f"({_CHARACTER}{{0,{more - 1}}}|{_CHARACTER}{{{more}}}{_CHARACTER}{{0,{BLOCK}}})"
    elif most:
        yield f"{_CHARACTER}{{0,{most}}}"


def regex(pattern: str) -> str:
    """A regular expression as part of a rule."""
    return f"Regex({json.dumps(pattern)})"


def reason(error: Exception) -> str:
    """What xgrammar says, without time and source file."""
    return re.sub(r"^\[[\d:]+\] \S+:\d+: (Check failed: .* is false: )?", "", str(error)).strip()
