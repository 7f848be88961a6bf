"""Which of an answer's tokens were drafted and accepted and which the target added itself, with the text of each."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.responses import TokenOrigin
from speculative.detokenizer import Detokenizer
from speculative.request import RequestOutput


class Origins:
    """Tells the origins of a response's tokens, each choice for itself. ``tokenizer`` is a Hugging Face one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._choices: dict[int, _Choice] = {}

    def more(self, index: int, output: RequestOutput) -> list[TokenOrigin]:
        """What an output adds to choice ``index``; the texts together are its ``text_delta``.

        Each new token is told at once, with an empty text where its text is not certain yet: bytes that do not form a character
        (which is the text of the token that completes it), or what may begin a stop string. A token whose text becomes certain
        later is told again, with that text.
        """
        if index not in self._choices:
            self._choices[index] = _Choice(Detokenizer(self._tokenizer))
        return self._choices[index].more(output)

    def whole(self, outputs: Sequence[RequestOutput]) -> list[TokenOrigin]:
        """The same of a finished choice, each token once."""
        choice = _Choice(Detokenizer(self._tokenizer))
        tokens: dict[int, TokenOrigin] = {}
        for each in (one for output in outputs for one in choice.more(output)):
            if each.index in tokens:
                tokens[each.index].text += each.text
            else:
                tokens[each.index] = each
        return [tokens[index] for index in sorted(tokens)]


@dataclass(slots=True)
class _Token:
    told: TokenOrigin
    missing: int
    """How many characters of its text are not certain yet."""


class _Choice:
    """One answer. A detokenizer without stop strings says how long each token's text is; the text itself is the engine's."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._untold: deque[_Token] = deque()
        self._count = 0

    def more(self, output: RequestOutput) -> list[TokenOrigin]:
        told = [_Token(TokenOrigin(index=each.told.index, text="", origin=each.told.origin), each.missing) for each in self._untold]
        for place, token in enumerate(output.new_token_ids):
            origin = TokenOrigin(index=self._count, text="", origin="draft" if place < output.num_accepted else "target")
            told.append(_Token(origin, len(self._detokenizer.add(token))))
            self._count += 1
        text, start = output.text_delta, 0
        for each in told:
            each.told.text = text[start : start + each.missing]
            each.missing -= len(each.told.text)
            start += len(each.told.text)
        if start < len(text):  # half a character at the end of a text has become one
            told[-1].told.text += text[start:]
        self._untold = deque(each for each in told if each.missing)
        first_new = self._count - len(output.new_token_ids)
        return [each.told for each in told if each.told.text or each.told.index >= first_new]
