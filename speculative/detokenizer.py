"""Tokens to text as they come, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Final

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_LAST: Final = 6
"""Tokens of what comes before a text that are looked at: the spaces and bytes of a word are no more, but for rare ones."""


class Detokenizer:
    """Incremental text of one request.

    Bytes that do not yet form a character wait, and so does text that could be the start of a stop string; what has been given out
    is never taken back. A stop string that is complete within the first ``min_tokens`` tokens ends nothing. ``special`` tokens
    have no text: those that are known need not be decoded again with every token behind them. ``before`` are tokens that the text
    goes on from: of one that begins, tokenizers of SentencePiece's kind leave out the first space.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        special: Set[int] = frozenset(),
        before: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=_whole(tokenizer, before), skip_special_tokens=True)
        self._stop = stop
        self._special = special
        self._unstoppable = min_tokens
        self._held = ""
        self._undecoded: list[int] = []
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that ``token`` makes certain; sets ``stopped`` when a stop string is complete."""
        if self._tokenizer is None:
            return ""
        self._unstoppable -= 1
        if token in self._special:
            return ""
        text = self._decode(self._tokenizer, token)
        if text is None:
            self._undecoded.append(token)
            return ""
        self._undecoded.clear()
        return self._release(text) if self._stop else text

    def _decode(self, tokenizer: Tokenizer, token: int) -> str | None:
        """The text up to ``token`` that has not been told; None where it is not certain yet."""
        try:
            return self._stream.step(tokenizer, token)
        except Exception:  # the library raises nothing more precise
            # Of bytes in a row some decoders make characters only if all of them are valid: one that is not would change text that
            # has been told. That stays, and what follows is decoded by itself.
            self._stream = DecodeStream(ids=[token], skip_special_tokens=True)
            return tokenizer.decode([*self._undecoded, token], skip_special_tokens=True)

    def flush(self) -> str:
        """All that waited, up to a stop string that sets ``stopped``: the text has ended."""
        text = ""
        if self._undecoded and self._tokenizer is not None:
            text = self._tokenizer.decode(self._undecoded, skip_special_tokens=True)
            self._undecoded.clear()
        if self._stop:
            text = self._release(text)
        held, self._held = self._held, ""
        return text + held

    def _release(self, text: str) -> str:
        before, held = len(self._held), self._held + text
        if self._unstoppable < 0:
            ends = [place for stop in self._stop if (place := held.find(stop, max(0, before - len(stop) + 1))) >= 0]
            if ends:
                self.stopped = True
                self._held = ""
                return held[: min(ends)]
        keep = max(overlap(held, stop) for stop in self._stop)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]


def _whole(tokenizer: Tokenizer | None, before: Sequence[int]) -> list[int]:
    """The last of these tokens; none where they end within a character, which would be told with its other half."""
    last = list(before[-_LAST:])
    return [] if tokenizer is None or tokenizer.decode(last).endswith("\N{REPLACEMENT CHARACTER}") else last


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
