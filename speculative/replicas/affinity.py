"""Which replica was sent what: an index of texts' beginnings, by the keys of `prefix_cache`. Bookkeeping only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MOST_KEYS: Final = 2**18
"""Blocks that are remembered: four million tokens, in some 60 MiB."""

MOST_HOLDERS: Final = 8
"""Replicas that are remembered of a block. What more have is a common system prompt."""

WORTHWHILE: Final = 0.5
"""Share of a prompt that speaks for who knows it even where many texts begin like that. Else all chats with one system prompt would
go to one replica."""


@dataclass(slots=True)
class _Block:
    """Who knows it, the key of the first block that came behind it, and whether others did too: then it is no text's own."""

    holders: tuple[str, ...] = ()
    next: bytes | None = None
    branches: bool = False


class Affinity:
    """At most ``most_keys`` blocks and as many sessions; the least recently used give way. Replicas forget too: it is a guess."""

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most = most_keys
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def near(self, keys: Sequence[bytes], session: str = "") -> tuple[str, ...]:
        """The replicas that know most of a text, the latest to be sent it first; none where many texts have that in common.

        ``session`` has a replica even where nothing else speaks for one.
        """
        known = next((place for place in range(len(keys), 0, -1) if keys[place - 1] in self._blocks), 0)
        holders: tuple[str, ...] = ()
        if known:
            block = self._blocks[keys[known - 1]]
            holders = block.holders if known >= WORTHWHILE * len(keys) or not block.branches else ()
        usual = self._sessions.get(session, "") if session else ""
        if not usual:
            return holders
        return (usual, *(each for each in holders if each != usual)) if usual in holders or not holders else (*holders, usual)

    def learn(self, keys: Sequence[bytes], replica: str, session: str = "") -> None:
        """A replica was sent, or has written, a text with these keys."""
        following: bytes | None = None
        for key in reversed(keys):  # a text's end is to go before its beginning
            block = self._blocks.pop(key, None) or _Block()
            block.holders = (replica, *(each for each in block.holders if each != replica))[:MOST_HOLDERS]
            block.branches = block.branches or (block.next is not None and following not in (None, block.next))
            block.next = block.next or following
            self._blocks[key] = block
            following = key
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
        if session:
            self._sessions.pop(session, None)
            self._sessions[session] = replica
            while len(self._sessions) > self._most:
                self._sessions.popitem(last=False)

    def forget(self, replicas: set[str]) -> None:
        """These are gone, and what they knew with them."""
        for key, block in list(self._blocks.items()):
            if not replicas.isdisjoint(block.holders):
                block.holders = tuple(each for each in block.holders if each not in replicas)
                if not block.holders:
                    del self._blocks[key]
        for session in [session for session, replica in self._sessions.items() if replica in replicas]:
            del self._sessions[session]
