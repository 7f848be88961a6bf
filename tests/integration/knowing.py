"""`moaserve` with a target that knows the answers to some questions: `python -m tests.integration.knowing serve …`.

What the bundled model says to most questions of clients' test suites is well formed and wrong: it has 13 M parameters. Here the
logits of a known answer's tokens are raised, as those of a model that knows it would be, before anything else is done with them.
All else is the server as it is: HTTP, templates, grammars, drafts and their verification, parsing of calls. An answer that the
request's rules do not let through is an error of the engine's, and a 500.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from llguidance import LLTokenizer
from torch import Tensor

import speculative.texts
from app.cli import main
from models.loader import BUNDLED, load_tokenizer
from speculative.grammar import GrammarMatcher
from speculative.request import SamplingParams
from speculative.sampler import Sampler

SURE = 1000.0
"""Added to the logit of the token that comes next: more than models differ by, or penalties take away."""


def call(name: str, **arguments: Any) -> str:
    """Arguments in the order of their names, as the bundled tokenizer's configuration says: forced calls are held to it."""
    written = json.dumps({"name": name, "arguments": dict(sorted(arguments.items()))}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


JOKE = {"setup": "Why do cats never play cards in the jungle?", "punchline": "Too many cheetahs."}
SUNNY = "It is sunny in San Francisco today."
CHINESE, JAPANESE = "你好啊集团", "こんにちは株式会社"
# A tool that there is, what the last message holds, the answer. The first line that fits counts.
ANSWERS = [
    ("magic_function", "magic_function(3)", call("magic_function", input=3)),
    ("magic_function_no_args", "magic_function_no_args()", call("magic_function_no_args")),
    ("Joke", "joke about cats", call("Joke", **JOKE)),
    ("", "joke about cats, no punchline", json.dumps(JOKE | {"punchline": None})),
    ("", "joke about cats", json.dumps(JOKE)),
    ("get_weather", "weather in San Francisco", call("get_weather", location="San Francisco, CA")),
    ("get_weather", "It's sunny.", SUNNY),
    ("unicode_customer", CHINESE, call("unicode_customer", customer_name=CHINESE, description="A technology company")),
    ("unicode_customer", JAPANESE, call("unicode_customer", customer_name=JAPANESE, description="A Japanese company")),
]


def answer(prompt: str) -> str | None:
    """What is known to be the answer to a rendered conversation."""
    messages = prompt.split("<|im_start|>")
    if len(messages) < 2:
        return None  # not a conversation: what is read at the start to measure its cost
    asked = messages[-2]
    return next((text for tool, said, text in ANSWERS if said in asked and (not tool or f"\n{tool}(" in prompt)), None)


@cache
def tokenizer() -> Any:
    return load_tokenizer(BUNDLED["target"])


@cache
def tokens() -> tuple[list[bytes], dict[bytes, int]]:
    """What each token stands for, and the token for it."""
    known = LLTokenizer(tokenizer()._tokenizer.to_str())
    texts = [known.decode_bytes([token]) for token in range(known.vocab_size)]
    return texts, {text: token for token, text in enumerate(texts)}


class KnowingSampler(Sampler):
    """Follows a known answer by its bytes: grammars, drafts and the text before may cut it into other tokens than its own."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt: Sequence[int],
        eos_token_ids: Iterable[int],
        grammar: GrammarMatcher | None = None,
    ) -> None:
        super().__init__(params, seed, prompt, eos_token_ids, grammar)
        self._end = min(eos_token_ids)
        known = answer(tokenizer().decode(list(prompt)))
        self._left = None if known is None else known.encode()

    def choose(self, logits: Callable[[], Tensor], best: int, drawn: int = -1) -> int:
        if self._left is None:
            return super().choose(logits, best, drawn)
        known = logits().clone()
        known[self._next(self._left)] += SURE
        token = super().choose(lambda: known, int(torch.argmax(known)))
        self._left = self._after(token, self._left)
        return token

    def _next(self, left: bytes) -> int:
        """The longest token that ``left`` begins with; the end if nothing is left."""
        _, ids = tokens()
        return next((ids[left[:length]] for length in range(len(left), 0, -1) if left[:length] in ids), self._end)

    def _after(self, token: int, left: bytes) -> bytes | None:
        """What is left of the answer after ``token``; None after its end."""
        if not left and token == self._end:
            return None
        text = tokens()[0][token]
        if not left.startswith(text) or not left:
            raise AssertionError(f"the rules let {text!r} through, and not the answer's {left!r}")
        return left[len(text) :]


if __name__ == "__main__":
    speculative.texts.Sampler = KnowingSampler  # type: ignore[misc]
    main()
