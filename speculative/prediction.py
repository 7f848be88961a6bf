"""What a caller expects the answer to be, and where in it the answer stands (OpenAI's predicted outputs)."""

from __future__ import annotations

from collections.abc import Sequence

ORDER = 3
"""Tokens that must match for the answer to be found again in its prediction, once it has left it."""

FIRST, LONGEST = 32, 64
"""Tokens drafted at first, and at most: drafts grow while they are accepted whole."""


class Prediction:
    """Follows an answer through its prediction. ``accepted`` counts the prediction's tokens that came, ``rejected`` the others."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self._ends: dict[tuple[int, ...], list[int]] = {}
        for end in range(ORDER, len(self.tokens) + 1):
            self._ends.setdefault(tuple(self.tokens[end - ORDER : end]), []).append(end)
        self._next: int | None = 0
        self._left = 0
        self._last: list[int] = []
        self._came: set[int] = set()
        self._length = FIRST

    @property
    def accepted(self) -> int:
        """How many of its tokens the answer has."""
        return len(self._came)

    @property
    def rejected(self) -> int:
        """How many it has not, so far."""
        return len(self.tokens) - len(self._came)

    def draft(self, most: int) -> list[int]:
        """What should come next; [] where the answer has left its prediction, or that is at its end."""
        return [] if self._next is None else self.tokens[self._next : self._next + min(self._length, most)]

    def follow(self, tokens: Sequence[int]) -> None:
        """Take the tokens of one verification."""
        whole = self._next is not None and len(tokens) > self._length
        for token in tokens:
            self._step(token)
        if self._next is None or not whole:
            self._length = FIRST
        else:
            self._length = min(2 * self._length, LONGEST)

    def _step(self, token: int) -> None:
        self._last = [*self._last[1 - ORDER :], token]
        if self._next is not None and self.tokens[self._next : self._next + 1] == [token]:
            self._came.add(self._next)
            self._next += 1
            return
        if self._next is not None:
            self._left = self._next
        # Text goes on where it was left, more often than further back.
        ends = self._ends.get(tuple(self._last), ())
        self._next = next((end for end in ends if end > self._left), ends[0] if ends else None)
        if self._next is not None:
            self._came.update(range(self._next - ORDER, self._next))
