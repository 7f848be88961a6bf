"""BlockStore: where blocks of key-value cache are kept between turns, restarts and servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class BlockStore(Protocol):
    """Keeps blocks of key-value cache (opaque bytes) under keys that say what is in them, for other turns, restarts and replicas.

    It may forget whatever it likes and raises nothing: a store that fails has nothing.
    """

    async def get(self, keys: Sequence[str]) -> list[bytes]:
        """The blocks of the leading keys that are there, up to the first that is not."""

    async def put(self, blocks: Mapping[str, bytes]) -> None:
        """Keep blocks; those that are there already are only used again (their time to live begins anew).

        They are put in the order in which they will be asked for: where room is short, the last of them are forgotten first.
        """

    async def known(self, keys: Sequence[str]) -> int:
        """How many leading keys are there; those count as used."""

    async def close(self) -> None:
        """Let go of what the store holds."""
