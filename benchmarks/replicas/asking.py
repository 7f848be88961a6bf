"""Chats over HTTP, as a client has them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

PLACES = (
    "Paris",
    "Oslo",
    "Lima",
    "Kyoto",
    "Cairo",
    "Quito",
    "Hanoi",
    "Sofia",
    "Accra",
    "Perth",
    "Turin",
    "Dakar",
    "Busan",
    "Malmö",
)
WISHES = (
    "Find me a hotel in {} for two nights, please.",
    "What can I see in {} in one day?",
    "I want to eat well in {} tonight. Where?",
    "How do I get from the airport of {} to its centre?",
    "Is there music in {} next weekend?",
)
FOLLOW_UPS = ("Is there something cheaper?", "And for five people?", "What about the day after?", "Please tell me more about it.")

Message = dict[str, str]


@dataclass(slots=True)
class Answer:
    """What a client was told: ``text`` as it came, how it ended, tokens, and when the first and the last words came."""

    text: str = ""
    finish_reason: str | None = None
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    pieces: list[float] = field(default_factory=list)

    @property
    def longest_pause(self) -> float:
        """Seconds between two pieces of text, at most."""
        return max((later - earlier for earlier, later in zip(self.pieces, self.pieces[1:], strict=False)), default=0.0)


def opening(number: int) -> list[Message]:
    """A chat's first message; ``number`` makes it its own."""
    wish = WISHES[number % len(WISHES)].format(PLACES[number // len(WISHES) % len(PLACES)])
    who = f"Traveller {number} of room {number * 7919 % 9973}, {number * 31 % 97} days on my way, writes:"
    return [{"role": "user", "content": f"{who} {wish} I have {number * 13 % 89 + 10} dollars and {number % 7} friends with me."}]


async def ask(
    client: httpx.AsyncClient, messages: Sequence[Message], max_tokens: int, seed: int, *, ignore_eos: bool = True, **more: Any
) -> Answer:
    """One streamed answer; an error is told in it."""
    body = {
        "messages": list(messages), "max_tokens": max_tokens, "seed": seed, "temperature": 1.0, "stream": True,
        "ignore_eos": ignore_eos, "stream_options": {"include_usage": True}, "tool_choice": "none", **more,
    }  # fmt: skip
    answer = Answer()
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body, timeout=300) as response:
            if response.status_code != 200:
                answer.error = f"{response.status_code}: {(await response.aread()).decode()[:300]}"
                return answer
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    _take(answer, json.loads(line[6:]))
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    if answer.finish_reason is None and answer.error is None:
        answer.error = "the stream ended without a finish reason"
    return answer


def _take(answer: Answer, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        answer.error = str(chunk["error"])
    for choice in chunk.get("choices", ()):
        if content := choice["delta"].get("content"):
            answer.text += content
            answer.pieces.append(time.monotonic())
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    if usage := chunk.get("usage"):
        answer.tokens, answer.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


async def rate(clients: Sequence[httpx.AsyncClient], streams: int, requests: int, max_tokens: int, first: int) -> float:
    """Tokens a second of ``requests`` by ``streams`` at once, dealt out to the servers in turn; RuntimeError where one fails.

    Texts have half of ``max_tokens`` to one and a half: equal ones would begin and end together, and be read in one pass.
    """
    numbers = iter(range(first, first + requests))

    async def work(client: httpx.AsyncClient) -> int:
        tokens = 0
        for number in numbers:
            answer = await ask(client, opening(number), max_tokens // 2 + number * 7919 % (max_tokens + 1), number)
            if answer.error is not None:
                raise RuntimeError(answer.error)
            tokens += answer.tokens
        return tokens

    began = time.monotonic()
    counts = await asyncio.gather(*(work(clients[stream % len(clients)]) for stream in range(streams)))
    return sum(counts) / (time.monotonic() - began)
