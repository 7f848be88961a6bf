"""Whether and how a model thinks before it answers; what its answer must be like does not hold for that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from app.revising import Outputs
from app.templates import template_text
from app.thoughts import CLOSER, OPENER, ReasoningFormat, ThoughtParser
from app.tools.grammar import named
from speculative.request import Grammar, RequestOutput

_NEAR = 16
"""Tokens at a prompt's end in which a mark is looked for: it is one of them, or a few."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """How answers to one prompt may begin: amid thoughts, as it has ``begun`` them, or with the mark that opens them.

    ``closer`` is the token that ends thoughts, where the tokenizer has one.
    """

    begun: bool
    closer: int | None = None

    def parser(self) -> ThoughtParser:
        """A parser for one answer."""
        return ThoughtParser(begun=self.begun)

    def before(self, grammar: Grammar) -> Grammar:
        """The same grammar for what follows the thoughts, which may be anything."""
        thoughts = "thoughts" if self.begun else f"({json.dumps(OPENER)} thoughts)?"
        lines = [f"start: {thoughts} @answer", "thoughts: thought SPACE?", f"thought[lazy]: /(?s:.*)/ {json.dumps(CLOSER)}"]
        whole = {"lark_grammar": "\n".join([*lines, r"SPACE: /\s{1,4}/"])}
        return Grammar("llguidance", json.dumps({"grammars": [whole, *named("answer", grammar)]}))


def thinking(chosen: ReasoningFormat, tokenizer: Any, prompt: Sequence[int], begun_answer: str | None) -> Thinking | None:
    """How the answer to a ``prompt`` may begin; None where there are no thoughts, or they are not to be told apart.

    Without a format ``chosen`` the chat template says whether its model thinks. Where an answer is continued, ``begun_answer`` is
    what there is of it.
    """
    if chosen == "none" or (chosen == "auto" and CLOSER not in template_text(tokenizer)):
        return None
    closer = tokenizer.backend_tokenizer.token_to_id(CLOSER)
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().get(closer)
    if added is not None and added.special:  # texts do not hold it
        return None
    if begun_answer is not None:
        return Thinking(True, closer) if begun_answer.rfind(OPENER) > begun_answer.rfind(CLOSER) else None
    end = tokenizer.decode(list(prompt[-_NEAR:])).rstrip()
    if end.endswith(CLOSER):  # the template has thought for the model: thinking is turned off
        return None
    return Thinking(end.endswith(OPENER), closer)


async def counted(outputs: Outputs, thinking: Thinking) -> Outputs:
    """The same outputs; their stats say how many tokens were thoughts, and the marks around them."""
    counts: dict[int, _Count] = {}
    async with aclosing(outputs):
        async for index, output in outputs:
            count = counts.setdefault(index, _Count(thinking)).of(output)
            yield index, replace(output, stats=replace(output.stats, num_reasoning_tokens=count))


class _Count:
    """The tokens of one answer's thoughts so far."""

    def __init__(self, thinking: Thinking) -> None:
        self._parser, self._closer = thinking.parser(), thinking.closer
        self._seen = self._count = 0

    def of(self, output: RequestOutput) -> int:
        """The same with the next output."""
        if self._parser.answering:
            return self._count
        tokens = output.new_token_ids
        self._parser.feed(output.text_delta, final=output.finish_reason is not None)
        if self._parser.thinking:
            self._count = self._seen + len(tokens)
        elif self._parser.answering and self._parser.thought:
            own = tokens.index(self._closer) + 1 if self._closer in tokens else len(tokens)
            self._count = self._seen + own
        self._seen += len(tokens)
        return self._count
