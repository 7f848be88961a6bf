"""Generated text -> thoughts, text and calls in the order in which they were written."""

from __future__ import annotations

from app.thinking import Thinking
from app.thoughts import Thought, ThoughtParser
from app.tools.calling import Calling
from app.tools.parsing import Piece, ToolParser


class Pieces:
    """Splits one answer; without parsers all is text."""

    def __init__(self, parser: ToolParser | None = None, thoughts: ThoughtParser | None = None) -> None:
        self._parser, self._thoughts = parser, thoughts

    @classmethod
    def of(cls, calling: Calling | None, thinking: Thinking | None) -> Pieces:
        """For one answer of a request, with its tools and thoughts if there are any."""
        return cls(calling.parser() if calling else None, thinking.parser() if thinking else None)

    @property
    def answering(self) -> bool:
        """True once there can be no more thoughts."""
        return self._thoughts is None or self._thoughts.answering

    @property
    def may_call(self) -> bool:
        """Whether there can be calls."""
        return self._parser is not None

    @property
    def num_calls(self) -> int:
        """How many have begun."""
        return 0 if self._parser is None else self._parser.num_calls

    def feed(self, text: str, *, final: bool) -> list[Piece]:
        """What more text made certain; ``final`` says that it was the last."""
        pieces: list[Piece] = []
        if self._thoughts is not None:
            thought, text = self._thoughts.feed(text, final=final)
            if thought:
                pieces.append(Thought(thought))
        if self._parser is not None:
            pieces += self._parser.feed(text, final=final).pieces
        elif text:
            pieces.append(text)
        return pieces
