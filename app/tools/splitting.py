"""RequestOutputs -> thoughts, text and calls, where an edge may write some of them alone and its server revise that."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from app.thoughts import Thought
from app.tools.parsing import CallDelta, Piece, append
from app.tools.pieces import Pieces
from speculative.common_prefix import common_prefix
from speculative.request import RequestOutput


@dataclass(frozen=True, slots=True)
class Split:
    """What an output adds to an answer. Of the text that was told before, the last ``dropped`` characters are void."""

    pieces: list[Piece]
    dropped: int = 0

    @property
    def text(self) -> str:
        """Its text, whatever stands between."""
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def thought(self) -> str:
        """What was thought."""
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Thought))

    @property
    def calls(self) -> list[CallDelta]:
        """Its calls."""
        return [piece for piece in self.pieces if isinstance(piece, CallDelta)]


@dataclass(slots=True)
class _Alone:
    """What has come since no server verifies: the state before it, its text, and what of that was told and is to be told."""

    before: Pieces
    in_text: bool
    first_character: int
    written: str = ""
    shown: str = ""
    held: list[Piece] | None = None


class Splitter:
    """Splits one answer into text and calls, as ``pieces`` does.

    Text that no server has verified is told, and may be dropped again. Calls are not, nor what follows them: they wait until they
    are verified, or the answer ends, as a call that was made cannot be taken back. Where the order of text and calls is told too
    (``ordered``), text that would begin behind a call, or might stand where a call will, waits like one. Of answers with thoughts
    nothing may come that no server has verified (`revising.verified`).
    """

    def __init__(self, pieces: Pieces, *, ordered: bool) -> None:
        self._pieces, self._ordered = pieces, ordered
        self._in_text = False
        self._num_characters = 0
        self._alone: _Alone | None = None

    @property
    def num_calls(self) -> int:
        """How many have begun."""
        return self._pieces.num_calls

    @property
    def answering(self) -> bool:
        """True once there can be no more thoughts."""
        return self._pieces.answering

    def feed(self, output: RequestOutput) -> Split:
        """Take the next output."""
        final, written, alone = output.finish_reason is not None, output.written, self._alone
        if written is not None and written.offline:
            return self._write_alone(output.text_delta, final)
        if alone is None:
            return Split(self._more(output.text_delta, final))
        if written is not None:
            return self._revise(alone, written.first_character, output.text_delta, final)
        if not (output.new_token_ids or final):
            return Split([])  # verified in part
        pieces = alone.held or []
        self._alone = None
        for piece in self._more(output.text_delta, final):
            append(pieces, piece)
        return Split(pieces)

    def _more(self, text: str, final: bool) -> list[Piece]:
        pieces = self._pieces.feed(text, final=final)
        self._num_characters += len(text)
        if pieces:
            self._in_text = isinstance(pieces[-1], str)
        return pieces

    def _write_alone(self, text: str, final: bool) -> Split:
        alone = self._alone
        if alone is None:
            alone = self._alone = _Alone(copy.deepcopy(self._pieces), self._in_text, self._num_characters)
            if self._ordered and self._pieces.may_call and not self._in_text:
                alone.held = []
        alone.written += text
        told: list[Piece] = []
        for piece in self._more(text, final):
            if alone.held is None and isinstance(piece, CallDelta):
                alone.held = []
            if alone.held is None:
                told.append(piece)
            else:
                append(alone.held, piece)
        told_now = Split(told)
        alone.shown += told_now.text
        if not final:
            return told_now
        for piece in alone.held or ():
            append(told, piece)
        return Split(told)

    def _revise(self, alone: _Alone, first_character: int, text: str, final: bool) -> Split:
        """Go back to where the last verified text ended, and take what is verified now from there."""
        kept = alone.written[: first_character - alone.first_character]
        self._alone, self._pieces, self._in_text = None, alone.before, alone.in_text
        self._num_characters = alone.first_character
        pieces = self._more(kept + text, final)
        first = pieces[0] if pieces else None
        same = min(common_prefix(alone.shown, first), len(kept)) if isinstance(first, str) else 0
        if isinstance(first, str):
            pieces[:1] = [first[same:]] if first[same:] else []
        return Split(pieces, len(alone.shown) - same)
