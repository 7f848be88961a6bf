"""Generated text -> text and calls in the order in which they were written."""

from __future__ import annotations

import re

from app.tools.parsing import CallDelta, ToolParser

Piece = str | CallDelta
_BOUNDARY = re.compile(r"([{}<])")
"""Without one of these no text passes from content to a call's arguments or back: they are an object, and marks end them."""


class Pieces:
    """Splits one answer; without a parser all is text."""

    def __init__(self, parser: ToolParser | None) -> None:
        self._parser = parser

    @property
    def num_calls(self) -> int:
        """How many have begun."""
        return 0 if self._parser is None else self._parser.num_calls

    def feed(self, text: str, *, final: bool) -> list[Piece]:
        """What more text made certain; ``final`` says that it was the last.

        The parser tells what a text holds but not in which order. So it gets no more at once than holds one kind: the order, from
        which items get their places, is then the same however many tokens came in a step.
        """
        if self._parser is None:
            return [text] if text else []
        pieces: list[Piece] = []
        parts = [part for part in _BOUNDARY.split(text) if part]
        for part, last in [*((part, False) for part in parts), *([("", True)] if final else [])]:
            parsed = self._parser.feed(part, final=last)
            if parsed.content:
                append(pieces, parsed.content)
            for call in parsed.calls:
                append(pieces, call)
        return pieces


def append(pieces: list[Piece], piece: Piece) -> None:
    """Add a piece, or make the last one longer."""
    match pieces[-1] if pieces else None, piece:
        case str(last), str():
            pieces[-1] = last + piece
        case CallDelta() as last, CallDelta(name=None):
            pieces[-1] = CallDelta(last.index, last.arguments + piece.arguments, last.id, last.name)
        case _:
            pieces.append(piece)
