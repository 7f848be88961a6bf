"""Outputs of an edge's that later ones take back: what is left of them, and how to have none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from speculative.request import RequestOutput

Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
"""What comes of requests, each output with its request's index."""


def revised(outputs: Sequence[RequestOutput]) -> Sequence[RequestOutput]:
    """A choice's outputs without what later ones have taken back."""
    kept: list[RequestOutput] = []
    for output in outputs:
        if (written := output.written) is not None and not written.offline:
            kept = _cut(kept, written.first_token, written.first_character)
        kept.append(output)
    return kept


def _cut(outputs: Sequence[RequestOutput], tokens: int, characters: int) -> list[RequestOutput]:
    """The outputs' first so many tokens and characters."""
    kept: list[RequestOutput] = []
    for output in outputs:
        own = output.new_token_ids[:tokens]
        logprobs = None if output.logprobs is None else output.logprobs[: len(own)]
        accepted = min(output.num_accepted, len(own))
        text = output.text_delta[:characters]
        kept.append(replace(output, new_token_ids=own, text_delta=text, logprobs=logprobs, num_accepted=accepted))
        tokens, characters = tokens - len(own), characters - len(text)
    return kept


async def verified(outputs: Outputs) -> Outputs:
    """The same outputs, where nothing is ever taken back: what no server has verified waits until one has, or the text ends."""
    waiting: dict[int, list[RequestOutput]] = defaultdict(list)
    told: dict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))
    async with aclosing(outputs):
        async for index, output in outputs:
            held, written, ends = waiting[index], output.written, output.finish_reason is not None
            if written is not None and not written.offline:
                tokens, characters = told[index]
                held[:] = _cut(held, written.first_token - tokens, written.first_character - characters)
            elif not ends and (written is not None or (held and not output.new_token_ids)):
                held.append(output)
                continue
            if written is None or not written.offline:
                held[:] = [replace(each, written=None) for each in held]
                output = replace(output, written=None)
            for each in [*held, output]:
                tokens, characters = told[index]
                told[index] = tokens + len(each.new_token_ids), characters + len(each.text_delta)
                yield index, each
            held.clear()
