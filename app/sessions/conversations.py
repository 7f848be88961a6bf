"""What the engine has computed of texts, carried to a store when they end and back when one goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from app.sessions.blocks import BlockStore
from app.sessions.engine import BlockEngine
from speculative.errors import EngineError
from speculative.prefix_cache import extend_keys
from speculative.request import Request

logger = logging.getLogger("moaserve.sessions")

WORTHWHILE: Final = 4
"""Blocks that a store is asked for at least: fewer are computed in the time that asking takes."""

MOST_WAITING: Final = 256
"""Ended texts that wait for a slow store; beyond, they are not stored."""


class Conversations:
    """Between an engine and a store, both of which may forget: nothing here fails a request."""

    def __init__(self, engine: BlockEngine, store: BlockStore) -> None:
        self._engine, self._store = engine, store
        self._storing: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()  # one text at a time: storing must not crowd out answering

    async def restore(self, requests: Sequence[Request]) -> None:
        """Hand the engine what the store has of prompts beyond what the engine itself knows."""
        prompts = {(request.given_token_ids, request.cache_salt): request for request in requests}
        for request in prompts.values():
            if request.params.prompt_logprobs is None:  # these need all of the prompt computed
                await self._restore(_keys(request, request.given_token_ids[:-1]))

    async def _restore(self, keys: list[bytes]) -> None:
        known = self._engine.known_blocks(keys)
        if len(keys) - known < WORTHWHILE:
            return
        blocks = await self._store.get(self._names(keys[known:]))
        if not blocks:
            return
        try:
            await self._engine.write_blocks(keys[: known + len(blocks)], blocks)
        except EngineError as error:
            logger.warning("stored blocks cannot be used: %s", error)

    def keep(self, request: Request, generated: Sequence[int]) -> None:
        """Store a text that has ended, some time soon; nobody waits for it."""
        keys = _keys(request, (*request.given_token_ids, *generated))
        if keys and len(self._storing) < MOST_WAITING:
            task = asyncio.create_task(self._keep(keys))
            self._storing.add(task)
            task.add_done_callback(self._storing.discard)

    async def _keep(self, keys: list[bytes]) -> None:
        async with self._turn:
            with suppress(EngineError):  # an engine that has ended knows nothing any more
                await self._store_new(keys)

    async def _store_new(self, keys: list[bytes]) -> None:
        names = self._names(keys)
        stored = await self._store.known(names)
        if blocks := await self._engine.read_blocks(keys, stored):
            await self._store.put(dict(zip(names[stored:], blocks, strict=False)))

    async def close(self, timeout: float) -> None:
        """Store what waits, as far as that goes within ``timeout`` seconds; the engine must still run."""
        if self._storing:
            _, late = await asyncio.wait(self._storing, timeout=timeout)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        fingerprint = self._engine.info.fingerprint
        return [f"{fingerprint}:{key.hex()}" for key in keys]


def _keys(request: Request, tokens: Sequence[int]) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, tokens, request.cache_salt)
    return keys
