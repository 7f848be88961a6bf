"""One JSON object that calls a tool, read character by character."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from typing import Literal

State = Literal["open", "key", "in key", "colon", "value", "in value", "next", "done", "failed"]


class CallReader:
    """Reads ``{"name": "f", "arguments": {…}}``; arguments may be called parameters, and other keys may stand beside.

    A call is ``committed`` once its name and the beginning of its arguments are known: it can be told from then on, and nothing
    that follows undoes it. Before that, ``failed`` says that this is no call, after it, that the call ends before the last
    character. Arguments are kept as they are written, valid JSON or not, up to the brace that closes them. With ``known``, other
    names fail, and so do objects without arguments.
    """

    def __init__(self, known: Set[str] | None = None) -> None:
        self._known = known
        self._state: State = "open"
        self._key = ""
        self._token: list[str] = []
        self._depth = 0
        self._in_string = self._escaped = self._broken = False
        self._arguments: list[str] | None = None
        self.name = ""

    @property
    def done(self) -> bool:
        """True when the object is complete."""
        return self._state == "done"

    @property
    def failed(self) -> bool:
        """True when the last character did not fit."""
        return self._state == "failed"

    @property
    def committed(self) -> bool:
        """True when this is a call, whatever follows."""
        return bool(self.name) and self._arguments is not None

    @property
    def exposed(self) -> bool:
        """True outside of strings, and in one that JSON does not allow: there a mark of the format is one."""
        return not self._in_string or self._broken

    def arguments(self) -> str:
        """The arguments' text since the last time."""
        text = "".join(self._arguments or ())
        if self._arguments:
            self._arguments.clear()
        return text

    def read(self, char: str) -> None:
        """Take one more character."""
        if self._state in ("in key", "in value"):
            self._inside(char)
        elif not char.isspace():
            self._between(char)

    def _between(self, char: str) -> None:
        match self._state, char:
            case "open", "{":
                self._state = "key"
            case "key", '"':
                self._key, self._state = "", "in key"
                self._begin(char)
            case "colon", ":":
                self._state = "value"
            case "value", _ if char not in ",:]}":
                self._state = "in value"
                self._begin(char)
            case "next", ",":
                self._state = "key"
            case "next", "}":
                self._end_object()
            case _:
                self._state = "failed"

    def _begin(self, char: str) -> None:
        self._token = []
        if self._key in ("arguments", "parameters"):
            if char != "{" or self._arguments is not None:
                self._state = "failed"
                return
            self._token = self._arguments = []
        self._depth = 0
        self._in_string = self._escaped = self._broken = False
        self._inside(char)

    def _inside(self, char: str) -> None:
        """A character of a key or a value, or the one after a number or a literal."""
        if self._token and not self._in_string and not self._depth and (char in ",}]" or char.isspace()):
            self._end_token()
            self.read(char)
            return
        if char == "<" and self.exposed and not self.committed:  # so that no text is read twice by several readers
            self._state = "failed"
            return
        self._token.append(char)
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = self._broken = False
            elif char < " ":
                self._broken = True
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        if char in '"}]' and not self._in_string and not self._depth:
            self._end_token()

    def _end_token(self) -> None:
        state, self._state = self._state, "next"
        if self._token is self._arguments:
            return
        if state == "in key":
            self._key, self._state = _string(self._token), "colon"
        elif self._key == "name":
            name = _string(self._token)
            if name.isprintable() and not self.name and (self._known is None or name in self._known):
                self.name = name
            if not self.name:
                self._state = "failed"

    def _end_object(self) -> None:
        self._state = "done" if self.name and (self._arguments is not None or self._known is None) else "failed"
        if self.done and self._arguments is None:
            self._arguments = ["{}"]


def _string(token: Sequence[str]) -> str:
    """What a JSON string says; nothing where it is none."""
    try:
        return str(json.loads("".join(token))) if token[0] == '"' else ""
    except ValueError:
        return ""
