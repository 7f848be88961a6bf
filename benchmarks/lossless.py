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

STREAMS = (1, 8)
"""Requests sent at a time."""

SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.3},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 40},
)

TEXTS = (1 + len(STREAMS)) * (1 + len(SAMPLED))
"""Written of every prompt by ``check``: one that is right, and one for each number of streams; greedily and sampled."""


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


def check(
    base_url: str,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    seed: int,
    progress: Callable[[], None],
) -> list[Comparison]:
    """A server's greedy text against that of a transformers ``model``, its sampled text with speculation on against off."""

    def texts(streams: int, **parameters: Any) -> list[str]:
        work = server_texts(base_url, prompts, concurrency=streams, progress=progress, max_tokens=max_tokens, **parameters)
        return asyncio.run(work)

    expected = reference_texts(model, tokenizer, prompts, max_tokens, progress)
    results = [
        compare(f"greedy, {streams} at a time, against transformers", texts(streams, temperature=0), expected)
        for streams in STREAMS
    ]
    for parameters in SAMPLED:
        plain = texts(1, seed=seed, speculative=False, **parameters)
        for streams in STREAMS:
            name = f"{parameters}, {streams} at a time, speculation on against off"
            results.append(compare(name, texts(streams, seed=seed, **parameters), plain))
    return results


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
