"""What a model thinks before it answers, told apart from the answer as its text comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from speculative.detokenizer import overlap

ReasoningFormat = Literal["auto", "think", "none"]

OPENER, CLOSER = "<think>", "</think>"
"""Around thoughts, as Qwen3, QwQ and DeepSeek's R1 and what was made of it write them."""


@dataclass(frozen=True, slots=True)
class Thought:
    """More of what a model thinks."""

    text: str


class ThoughtParser:
    """Splits one answer into thoughts and the rest.

    What it gives, put together, is the same however the text is cut into pieces. White space around thoughts belongs to neither.
    """

    def __init__(self, *, begun: bool) -> None:
        self._state: Literal["opening", "thinking", "thought", "answering"] = "thinking" if begun else "opening"
        self._text = ""  # what has come and is not decided
        self._thought = begun
        self._said = False  # whether a thought has been given out

    @property
    def answering(self) -> bool:
        """True once there can be no more thoughts."""
        return self._state in ("thought", "answering")

    @property
    def thinking(self) -> bool:
        """True amid thoughts."""
        return self._state == "thinking"

    @property
    def thought(self) -> bool:
        """True once there have been thoughts, be they empty."""
        return self._thought

    def feed(self, text: str, *, final: bool = False) -> tuple[str, str]:
        """Take more text; what it made certain of the thoughts and of the rest. ``final`` says that it was the last."""
        self._text += text
        thought = ""
        if self._state == "opening":
            self._open(final)
        if self._state == "thinking":
            thought = self._think(final)
        if self._state == "thought" and (rest := self._text.lstrip()):
            self._state, self._text = "answering", rest
        if self._state != "answering":
            return thought, ""
        told, self._text = self._text, ""
        return thought, told

    def _open(self, final: bool) -> None:
        begun = self._text.lstrip()
        if begun.startswith(OPENER):
            self._state, self._text, self._thought = "thinking", begun.removeprefix(OPENER), True
        elif final or not OPENER.startswith(begun):
            self._state = "answering"

    def _think(self, final: bool) -> str:
        thought, mark, rest = self._text.partition(CLOSER)
        if mark:
            self._state, self._text, certain = "thought", rest, thought.rstrip()
        else:
            waiting = 0 if final else overlap(thought, CLOSER)
            certain = thought[: len(thought) - waiting].rstrip()
            self._text = "" if final else thought[len(certain) :]
        if not self._said:
            certain = certain.lstrip()
        self._said = self._said or bool(certain)
        return certain
