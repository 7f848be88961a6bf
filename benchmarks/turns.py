"""`moaserve bench turns`: how soon a conversation's second turn begins, where its first is known and where it is not."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import httpx
from transformers import PreTrainedTokenizerBase

from benchmarks.offline import spread
from benchmarks.prompts import Prompt

THINKING_S = 0.5
"""Between two questions, as from people; in that time a server stores the text that has ended."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A second turn: seconds until its first token came, its prompt's tokens, and those of them that were known."""

    seconds: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """Second turns asked one ``way``, beside the same ones asked of a server that knows nothing of them."""

    way: str
    turns: tuple[Turn, ...]
    cold: tuple[Turn, ...]

    @property
    def faster(self) -> list[float]:
        """How many times sooner each began."""
        return [cold.seconds / turn.seconds for turn, cold in zip(self.turns, self.cold, strict=True)]

    @property
    def computed(self) -> float:
        """Share of all prompts' tokens that were computed."""
        return 1 - sum(turn.cached_tokens for turn in self.turns) / sum(turn.prompt_tokens for turn in self.turns)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        seconds = {"seconds": [turn.seconds for turn in self.turns], "cold_seconds": [turn.seconds for turn in self.cold]}
        return {"way": self.way, "faster": median(self.faster), "computed": self.computed, **seconds}

    def line(self) -> str:
        """For people."""
        faster = spread(self.faster)
        first = median(turn.seconds for turn in self.turns) * 1000
        cold = median(turn.seconds for turn in self.cold) * 1000
        return (
            f"{self.way}: first token after {first:.0f} ms instead of {cold:.0f}, {faster['median']:.1f}x sooner "
            f"({faster['p25']:.1f}–{faster['p75']:.1f}); {self.computed:.1%} of the prompts computed"
        )


def measure(
    base_url: str,
    other_url: str | None,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    conversations: int,
    tokens: int,
    name: str,
    progress: Callable[[], None],
) -> list[TurnFigures]:
    """Conversations whose first turn has ``tokens`` tokens of text, their second asked again, one at a time.

    ``name`` keeps a run's conversations apart from all others'.
    """
    texts = texts_of(tokenizer, prompts, conversations, tokens)
    return asyncio.run(_measure(base_url, other_url, texts, name, progress))


async def _measure(
    base_url: str, other_url: str | None, texts: Sequence[str], name: str, progress: Callable[[], None]
) -> list[TurnFigures]:
    found: dict[str, list[Turn]] = {"cold": [], "the same server": [], "another server": []}
    async with httpx.AsyncClient(timeout=None) as client:
        for number, text in enumerate(texts):
            mine, nobodys = f"{name}-{number}", f"{name}-{number}-cold"
            said: list[dict[str, str]] = [{"role": "user", "content": text}]
            answer, _ = await ask_turn(client, base_url, said, mine, max_tokens=48)
            said += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Thank you. And then?"}]
            # What the same server is asked first is stored: another one is asked something else.
            others = [*said[:-1], {"role": "user", "content": "Many thanks! What now?"}]
            asked = [("cold", base_url, said, nobodys), ("the same server", base_url, said, mine)]
            asked += [] if other_url is None else [("another server", other_url, others, mine)]
            for way, url, messages, salt in asked:
                await asyncio.sleep(THINKING_S)
                found[way].append((await ask_turn(client, url, messages, salt))[1])
            progress()
    cold = tuple(found.pop("cold"))
    return [TurnFigures(way, tuple(turns), cold) for way, turns in found.items() if turns]


async def ask_turn(
    client: httpx.AsyncClient, url: str, messages: Sequence[dict[str, str]], salt: str, max_tokens: int = 4
) -> tuple[str, Turn]:
    """An answer and its figures; only requests of equal ``salt`` share what is known of prompts. Raises httpx.HTTPError."""
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "cache_salt": salt, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    said, first = "", 0.0
    usage: dict[str, Any] = {}
    began = time.perf_counter()
    async with client.stream("POST", f"{url}/chat/completions", json=body) as response:
        if response.is_error:
            await response.aread()
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    first = first or time.perf_counter() - began
                    said += text
    return said, Turn(first, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def texts_of(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], count: int, tokens: int) -> list[str]:
    """``count`` different texts of ``tokens`` tokens: the prompts one after another, begun at another one each time."""
    texts, special = [], set(tokenizer.all_special_ids)
    for number in range(count):
        ids: list[int] = []
        place = number
        while len(ids) < tokens:
            ids += (token for token in prompts[place % len(prompts)].token_ids if token not in special)
            place += 1
        texts.append(str(tokenizer.decode(ids[:tokens])))
    return texts
