"""`moaserve bench lossless`: is a running server's text what plain decoding and transformers' generate give?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from transformers import PreTrainedTokenizerBase

from benchmarks.decoding import decode_with_transformers
from benchmarks.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many of ``total`` texts were the same, and the first prompts that were not."""

    name: str
    total: int
    different: tuple[int, ...]

    @property
    def ok(self) -> bool:
        """True when every text was the same."""
        return not self.different

    def line(self) -> str:
        """For people."""
        first = f" (first different: prompt {self.different[0]})" if self.different else ""
        return f"{self.name}: {self.total - len(self.different)} of {self.total} the same{first}"


def compare(name: str, texts: Sequence[str], expected: Sequence[str]) -> Comparison:
    """Text by text."""
    pairs = zip(texts, expected, strict=True)
    return Comparison(name, len(texts), tuple(index for index, (a, b) in enumerate(pairs) if a != b))


def reference_texts(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], max_tokens: int, progress: Callable[[], None]
) -> list[str]:
    """What transformers' greedy ``generate`` writes."""
    texts: list[str] = []
    for prompt in prompts:
        token_ids = decode_with_transformers(model, prompt, max_tokens).token_ids
        texts.append(str(tokenizer.decode(list(token_ids), skip_special_tokens=True)))
        progress()
    return texts


async def server_texts(
    base_url: str, prompts: Sequence[Prompt], *, concurrency: int, progress: Callable[[], None] = lambda: None, **parameters: Any
) -> list[str]:
    """What the server's completions API writes for the same token ids; ``parameters`` go into every request."""
    gate = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=base_url, timeout=None) as client:

        async def one(prompt: Prompt) -> str:
            async with gate:
                response = await client.post("/completions", json={"prompt": list(prompt.token_ids), **parameters})
            response.raise_for_status()
            progress()
            return str(response.json()["choices"][0]["text"])

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))
