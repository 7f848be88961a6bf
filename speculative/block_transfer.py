"""Blocks of the prefix cache from one engine to another, a portion at a time: running texts go on in between."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from speculative.engine import Engine
from speculative.errors import EngineError
from speculative.kv_bytes import BlockFormat, Contents
from speculative.prefixes import PORTION_BLOCKS

T = TypeVar("T")

logger = logging.getLogger("moaserve.engine")


class Ask(Protocol):
    """Has an engine's thread do something between two steps."""

    def __call__(self, work: Callable[[Engine], T]) -> Awaitable[T]:
        """What comes of it; raises what it raises, and EngineNotReadyError where nobody does it."""


async def read_blocks(format: BlockFormat, ask: Ask, keys: Sequence[bytes], first: int) -> list[bytes]:
    """As in AsyncEngine."""
    blocks: list[bytes] = []
    try:
        for begin in range(first, len(keys), PORTION_BLOCKS):
            portion = keys[: begin + PORTION_BLOCKS]
            contents = await ask(_reading(portion, begin))
            blocks += await asyncio.to_thread(format.pack, contents)
            if begin + len(contents.drafted) < len(portion):
                break
    except EngineError:
        raise
    except Exception:  # what is only to be stored fails nobody
        logger.exception("blocks could not be read")
    return blocks


async def write_blocks(format: BlockFormat, ask: Ask, keys: Sequence[bytes], blocks: Sequence[bytes]) -> None:
    """As in AsyncEngine; raises InvalidBlockError."""
    first = len(keys) - len(blocks)
    for begin in range(0, len(blocks), PORTION_BLOCKS):
        contents = await asyncio.to_thread(format.unpack, blocks[begin : begin + PORTION_BLOCKS])
        portion = keys[: first + begin + len(contents.drafted)]
        try:
            await ask(_adding(portion, contents))
        except EngineError:
            raise
        except Exception:
            logger.exception("blocks could not be kept")
            return


def _reading(keys: Sequence[bytes], first: int) -> Callable[[Engine], Contents]:
    return lambda engine: engine.prefixes.read(keys, first)


def _adding(keys: Sequence[bytes], contents: Contents) -> Callable[[Engine], None]:
    return lambda engine: engine.prefixes.add(keys, contents)
