"""A thousand clients that leave at any moment, in every way that clients leave."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import httpx
import pytest

from tests.integration.conftest import Server

pytestmark = pytest.mark.integration

REQUESTS, AT_ONCE = 1000, 48
QUESTION = {"messages": [{"role": "user", "content": "Say hello."}], "temperature": 0, "max_tokens": 24}


class Leaver:
    """One client; what it asks and when it leaves is drawn from its own seed."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._path = self._draw.choice(["/chat/completions", "/completions"])
        prompt = self._draw.choice(["Hi", "Hello there, how are you today?", "1 2 3 4 5 " * self._draw.randint(1, 20)])
        words: dict[str, Any] = (
            {"prompt": prompt} if self._path == "/completions" else {"messages": [{"role": "user", "content": prompt}]}
        )
        # Nobody stays for so many tokens: every one of these requests is aborted.
        self._body = words | {
            "max_tokens": 1500,
            "min_tokens": 1500,
            "temperature": self._draw.choice([0, 1, 2]),
            "n": self._draw.choice([1, 1, 1, 2]),
            "seed": seed,
        }

    async def ask(self, client: httpx.AsyncClient) -> None:
        patience = self._draw.choice([self._draw.uniform(0.002, 0.02), self._draw.expovariate(20), self._draw.expovariate(4)])
        leave = self._draw.choice([self._while_waiting, self._after_some_events, self._amid_events])
        await leave(client, patience)

    async def _while_waiting(self, client: httpx.AsyncClient, patience: float) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.post(self._path, json=self._body), patience)

    async def _after_some_events(self, client: httpx.AsyncClient, _patience: float) -> None:
        wanted = self._draw.randint(0, 6)
        async with client.stream("POST", self._path, json=self._body | {"stream": True}) as response:
            assert response.status_code == 200
            async for _ in response.aiter_lines():
                wanted -= 1
                if wanted < 0:
                    break

    async def _amid_events(self, client: httpx.AsyncClient, patience: float) -> None:
        async def read() -> None:
            async with client.stream("POST", self._path, json=self._body | {"stream": True}) as response:
                async for line in response.aiter_lines():
                    assert "error" not in line

        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(read(), patience)


def test_a_thousand_aborted_requests_leave_nothing_behind(server: Server) -> None:
    def answer() -> Any:
        return httpx.post(f"{server.base_url}/chat/completions", json=QUESTION, timeout=60).json()["choices"]

    async def all_leave() -> None:
        turns = asyncio.Semaphore(AT_ONCE)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        async with httpx.AsyncClient(base_url=server.base_url, timeout=60, limits=limits) as client:

            async def one(seed: int) -> None:
                async with turns:
                    await Leaver(seed).ask(client)

            await asyncio.gather(*(one(seed) for seed in range(REQUESTS)))

    before = answer()
    asyncio.run(all_leave())
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    deadline = time.monotonic() + 30
    while any(server.metric(f"moaserve_{name}") for name in gauges):
        assert time.monotonic() < deadline, {name: server.metric(f"moaserve_{name}") for name in gauges}
    assert answer() == before
    assert server.process.poll() is None
    assert not [line for line in server.log if "Traceback" in line or " ERROR " in line]
