"""Outboxes: a replica's messages for each ingress, which leave together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Final

from speculative.replicas.messages import Told
from speculative.waiting import set_within

GATHER_S: Final = 0.02
"""Seconds for which a message may wait for others, once a text has begun: sending one costs more than what is in it, and nobody
reads that fast."""

KEEP_S: Final = 60.0
"""Seconds for which messages wait for an ingress that does not listen, as long as others come and go."""


@dataclass(slots=True)
class _Outbox:
    """``is_waited_for`` is set while there is a message that must not wait, ``is_left`` once another has taken its place."""

    began: float
    messages: list[Told] = field(default_factory=list)
    is_filled: asyncio.Event = field(default_factory=asyncio.Event)
    is_waited_for: asyncio.Event = field(default_factory=asyncio.Event)
    has_listener: bool = False
    is_left: bool = False

    def put(self, told: Told) -> None:
        self.messages.append(told)
        self.is_filled.set()
        if not told.can_wait:
            self.is_waited_for.set()

    def leave(self) -> None:
        self.is_left = True
        self.is_filled.set()
        self.is_waited_for.set()

    def take(self) -> tuple[Told, ...]:
        messages, self.messages = tuple(self.messages), []
        self.is_filled.clear()
        self.is_waited_for.clear()
        return messages


class Outboxes:
    """One for each ingress, by a name that it gives itself. All of it on one event loop."""

    def __init__(self, gather_s: float = GATHER_S, keep_s: float = KEEP_S) -> None:
        self._gather_s, self._keep_s = gather_s, keep_s
        self._boxes: dict[str, _Outbox] = {}

    def __len__(self) -> int:
        return len(self._boxes)

    def put(self, listener: str, told: Told) -> None:
        """To be told to ``listener``: now, or once it listens."""
        if (box := self._boxes.get(listener)) is None:
            box = self._open(listener)
        box.put(told)

    async def listen(self, listener: str) -> AsyncGenerator[tuple[Told, ...], None]:
        """All messages for ``listener``, gathered, without end; the first tuple is empty and says that it is listened to.

        Who listened under that name before is told nothing more.
        """
        before = self._boxes.pop(listener, None)
        box = self._open(listener)
        box.has_listener = True
        if before is not None:
            for told in before.take():
                box.put(told)
            before.leave()
        try:
            yield ()
            while True:
                await box.is_filled.wait()
                await set_within(box.is_waited_for, self._gather_s)
                if box.is_left:
                    return
                yield box.take()
        finally:
            if self._boxes.get(listener) is box:
                del self._boxes[listener]

    def _open(self, listener: str) -> _Outbox:
        now = time.monotonic()
        for name in [name for name, box in self._boxes.items() if not box.has_listener and now - box.began > self._keep_s]:
            del self._boxes[name]
        box = self._boxes[listener] = _Outbox(now)
        return box
