"""Generated text -> text and calls in the order in which they were written."""

from __future__ import annotations

from app.tools.parsing import Piece, ToolParser


class Pieces:
    """Splits one answer; without a parser all is text."""

    def __init__(self, parser: ToolParser | None) -> None:
        self._parser = parser

    @property
    def num_calls(self) -> int:
        """How many have begun."""
        return 0 if self._parser is None else self._parser.num_calls

    def feed(self, text: str, *, final: bool) -> list[Piece]:
        """What more text made certain; ``final`` says that it was the last."""
        if self._parser is None:
            return [text] if text else []
        return list(self._parser.feed(text, final=final).pieces)
