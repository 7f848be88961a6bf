"""Having a server write once to all memory that texts are kept in: an operating system gives memory at its first write.

A virtual machine's may take twenty times as long for that as copying does, and a process looks as if it grew.
"""

from __future__ import annotations

import asyncio
import random
import sys

import httpx

TEMPERATURE = 2.0
"""Nobody asks with it: what drafts gain is known by temperature, and these texts are noise."""

_IDS = range(16, 256)
"""Token ids that every vocabulary has."""


async def fill(client: httpx.AsyncClient, num_texts: int, most: int | None = None) -> None:
    """Have ``num_texts`` texts, as many as run at once, each grow as long as can be, or to ``most`` tokens.

    Raises httpx.HTTPError.
    """
    models = await client.get("/v1/models")
    models.raise_for_status()
    length = min(int(models.json()["data"][0]["max_model_len"]), most or sys.maxsize)
    # Answers are long enough that the first goes on while the last is read.
    answer = length // 4

    async def grow(number: int) -> None:
        prompt = random.Random(number).choices(_IDS, k=length - answer)
        body = {"prompt": prompt, "max_tokens": answer, "ignore_eos": True, "temperature": TEMPERATURE}
        (await client.post("/v1/completions", json=body, timeout=None)).raise_for_status()

    await asyncio.gather(*(grow(number) for number in range(num_texts)))
