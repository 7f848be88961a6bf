"""How much may wait: what is refused because there is too much already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.errors import InvalidParameterError, TooManyRequestsError


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait; None is no limit."""

    requests: int | None
    tokens: int | None

    def halved(self) -> QueueLimits:
        """Half of each."""
        return QueueLimits(*(None if most is None else most // 2 for most in (self.requests, self.tokens)))


@dataclass(slots=True)
class Held:
    """Requests that have been let in, and tokens of their prompts that have not been read."""

    requests: int = 0
    tokens: int = 0


class Admission:
    """How much may wait: requests beyond those that ``slots`` decode, and tokens of prompts that have not been begun.

    None is no limit. What a request brings counts from the moment that it is let in until it has ended, its prompt until it has
    been read. Where callers have several keys, what those of one key have waiting may be half of that: none keeps all others out.
    """

    def __init__(self, slots: int, most_requests: int | None, most_tokens: int | None, *, several_keys: bool = False) -> None:
        self._slots, self._several_keys = slots, several_keys
        self._limits = QueueLimits(most_requests, most_tokens)
        self._own_limits = self._limits.halved() if several_keys else self._limits
        self._all = Held()
        self._own: dict[str, Held] = {}

    def take(self, prompts: Sequence[int], owner: str = "") -> Places:
        """Places for requests with prompts of these lengths, of the key that ``owner`` names.

        Raises TooManyRequestsError where there is no room for all of them now, and InvalidParameterError where there never is.
        """
        self.check(len(prompts))
        most_tokens = self._own_limits.tokens
        if most_tokens is not None and len(prompts) > self._slots and sum(prompts) > most_tokens:
            raise InvalidParameterError(
                f"This server writes {self._slots} texts at a time. Where a request has more, their prompts may have "
                f"{most_tokens} tokens together, and these {len(prompts)} have {sum(prompts)}."
            )
        everyone, own = (self._limits, self._all, ""), (self._own_limits, self._own.get(owner, Held()), " of your key's")
        for limits, held, whose in (own, everyone) if self._several_keys else (everyone,):
            waiting = held.requests + len(prompts) - self._slots
            if limits.requests is not None and waiting > limits.requests:
                raise TooManyRequestsError(f"{limits.requests} requests{whose} may wait, and do.", code="queue_full")
            if limits.tokens is not None and waiting > 0 and held.tokens + sum(prompts) > limits.tokens:
                raise TooManyRequestsError(f"{limits.tokens} prompt tokens{whose} may wait, and do.", code="queue_full")
        return Places(self, prompts, owner)

    def check(self, texts: int) -> None:
        """Refuse more texts in one request than there ever is room for: to come back later would not help."""
        most = self._own_limits.requests
        if most is not None and texts > self._slots + most:
            raise InvalidParameterError(
                f"This server takes {self._slots + most} texts at a time, and this request asks for {texts}."
            )

    def count(self, requests: int, tokens: int, owner: str) -> None:
        """Add to what is counted, or take from it."""
        own = self._own.setdefault(owner, Held())
        for held in (self._all, own):
            held.requests += requests
            held.tokens += tokens
        if not own.requests:
            del self._own[owner]


class Places:
    """What requests take of an `Admission`. Giving back twice is giving back once: whoever may be last does it to be sure."""

    def __init__(self, admission: Admission, prompts: Sequence[int], owner: str) -> None:
        self._admission, self._owner = admission, owner
        self._unread = dict(enumerate(prompts))
        self._taken = set(self._unread)
        admission.count(len(prompts), sum(prompts), owner)

    def read(self, index: int) -> None:
        """A request's prompt has been read."""
        if index in self._unread:
            self._admission.count(0, -self._unread.pop(index), self._owner)

    def end(self, index: int) -> None:
        """A request has ended."""
        self.read(index)
        if index in self._taken:
            self._taken.remove(index)
            self._admission.count(-1, 0, self._owner)

    def release(self) -> None:
        """All have ended, or will never begin."""
        for index in list(self._taken):
            self.end(index)
