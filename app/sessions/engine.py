"""BlockEngine: what sessions need of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from speculative.config import ModelInfo


class BlockEngine(Protocol):
    """The part of `speculative.async_engine.AsyncEngine` that knows which blocks of key-value cache there are."""

    @property
    def info(self) -> ModelInfo:
        """The loaded model; raises EngineNotReadyError before."""

    def known_blocks(self, keys: Sequence[bytes]) -> int:
        """How many of a text's leading blocks, by their keys, need not be computed."""

    async def read_blocks(self, keys: Sequence[bytes], first: int) -> list[bytes]:
        """The leading blocks that are kept, from the one numbered ``first`` on."""

    async def write_blocks(self, keys: Sequence[bytes], blocks: Sequence[bytes]) -> None:
        """Keep blocks that another engine has computed, the last of ``keys``; raises InvalidBlockError."""
