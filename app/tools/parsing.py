"""Generated text -> content and tool calls, as the text comes."""

from __future__ import annotations

import uuid
from collections.abc import Set
from dataclasses import dataclass

from app.thoughts import Thought
from app.tools.formats import Format
from app.tools.reading import CallReader
from speculative.detokenizer import overlap


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of call number ``index``: its id and name come once, with the first of its arguments' text."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


Piece = str | CallDelta | Thought
"""More of an answer; of what its model thought there is more only before all others."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What more text made certain: content and calls in the order in which they were written."""

    pieces: tuple[Piece, ...]

    @property
    def content(self) -> str:
        """Its content, whatever stands between."""
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def calls(self) -> tuple[CallDelta, ...]:
        """Its calls."""
        return tuple(piece for piece in self.pieces if isinstance(piece, CallDelta))


class ToolParser:
    """Splits one answer into content and calls.

    What it gives, put together, is the same in the same order however the text is cut into pieces. Text that may become a call
    waits until it is one or cannot be; what cannot be is content, to the last character. White space and separators next to a
    call belong to neither, but content goes on after a call with the space that it had. Where calls need no opener, or are
    ``only`` to be of given tools, only the ``names`` of these make one.
    """

    def __init__(self, format: Format, names: Set[str], *, only: bool = False) -> None:
        self._format = format
        self._known = names if format.bare or only else None
        self._text = ""  # what has come and is not decided
        self._lead = ""  # of a call that is not committed: what goes before its object if it is none
        self._reader: CallReader | None = None
        self._read = 0  # characters of the text that the reader has
        self._told = False  # whether the reader's call has been given out
        self._unclosed = False  # whether a call's closer is still to come
        self._beside_call = False  # whether there has been nothing since a call
        self._said = False  # whether there has been content
        self._bare = format.bare  # whether an object may begin here without an opener
        self._pieces: list[Piece] = []
        self.num_calls = 0

    def feed(self, text: str, *, final: bool = False) -> Parsed:
        """Take more text; ``final`` says that it was the last."""
        self._text += text
        while self._in_call(final) if self._reader else self._in_content(final):
            pass
        parsed = Parsed(tuple(self._pieces))
        self._pieces = []
        return parsed

    def _in_content(self, final: bool) -> bool:
        """Give out content up to the next call; True when there is more to do."""
        if self._bare and self._beside_calls():
            return True
        marks = [self._format.opener]
        if self._unclosed and self._format.closer:
            marks.append(self._format.closer)
        places = {place: mark for mark in marks if (place := self._text.find(mark)) >= 0}
        if not places:
            waiting = 0 if final else max(overlap(self._text, mark) for mark in marks)
            kept = self._text[: len(self._text) - waiting]
            certain = kept if final else kept.rstrip()
            self._give(certain)
            self._text = self._text[len(certain) :]
            return False
        place = min(places)
        mark = places[place]
        before, rest = self._text[:place], self._text[place + len(mark) :]
        certain = before.rstrip()
        self._give(certain)
        if mark == self._format.opener:
            self._begin(before[len(certain) :] + mark, rest)
        else:
            self._text, self._unclosed, self._beside_call = rest, False, True
        return True

    def _beside_calls(self) -> bool:
        """Begin a call that needs no opener, or pass over what separates it from the one before; False where there is neither."""
        rest = self._text.lstrip()
        if rest.startswith("{"):
            self._begin(self._text[: -len(rest)], rest)
            return True
        if self.num_calls and rest.startswith(";"):
            self._text = rest[1:]
            return True
        self._bare = not rest
        return False

    def _begin(self, lead: str, text: str) -> None:
        self._lead, self._text = lead, text
        self._reader, self._read, self._told = CallReader(self._known), 0, False

    def _in_call(self, final: bool) -> bool:
        """Read on in a call; True when it has ended and there is more to do."""
        reader, closer = self._reader, self._format.closer
        assert reader is not None
        while self._read < len(self._text) and not reader.done:
            char = self._text[self._read]
            if closer and char == closer[0] and reader.exposed:
                if self._text.startswith(closer, self._read):
                    break
                if not final and closer.startswith(self._text[self._read :]):
                    self._tell(reader)
                    return False
            reader.read(char)
            if reader.failed:
                break
            self._read += 1
        else:
            if not reader.done and not final:
                self._tell(reader)
                return False
        self._tell(reader)
        self._reader = None
        if not self._told:
            self._give(self._lead)
            self._bare = False
        else:
            self._text = self._text[self._read :]
            self._unclosed, self._beside_call, self._bare = True, True, self._format.bare
        return True

    def _tell(self, reader: CallReader) -> None:
        """Give out what is new of a committed call; its text need not be kept any longer."""
        if not reader.committed:
            return
        new, self._text, self._read = reader.arguments(), self._text[self._read :], 0
        if not self._told:
            self._told = True
            append(self._pieces, CallDelta(self.num_calls, new, f"call_{uuid.uuid4().hex[:24]}", reader.name))
            self.num_calls += 1
        elif new:
            append(self._pieces, CallDelta(self.num_calls - 1, new))

    def _give(self, content: str) -> None:
        if self._beside_call and not (self._said and content.strip()):
            content = content.lstrip()
        if content:
            append(self._pieces, content)
            self._beside_call, self._said = False, True


def append(pieces: list[Piece], piece: Piece) -> None:
    """Add a piece, or make the last one longer."""
    match pieces[-1] if pieces else None, piece:
        case str(last), str():
            pieces[-1] = last + piece
        case CallDelta() as last, CallDelta(name=None):
            pieces[-1] = CallDelta(last.index, last.arguments + piece.arguments, last.id, last.name)
        case _:
            pieces.append(piece)
