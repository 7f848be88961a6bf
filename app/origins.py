"""Which of an answer's tokens were drafted and accepted and which the target added itself, with the text of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Tokenizer

from app.responses import TokenOrigin
from speculative.detokenizer import Detokenizer
from speculative.request import RequestOutput


class Origins:
    """Tells the origins of a response's tokens, each choice for itself. ``tokenizer`` is a Hugging Face one.

    ``before`` has, for each choice, the tokens that its text goes on from; none where texts begin.
    """

    def __init__(self, tokenizer: Any, before: Sequence[Sequence[int]] = ()) -> None:
        self._tokenizer, self._before = tokenizer.backend_tokenizer, before
        self._choices: dict[int, _Choice] = {}

    def more(self, index: int, output: RequestOutput) -> list[TokenOrigin]:
        """What an output adds to choice ``index``; the texts together are its ``text_delta``.

        Each new token is told at once, with an empty text where its text is not certain yet: bytes that do not form a character
        (which is the text of the token that completes it), or what may begin a stop string. A token whose text becomes certain
        later is told again, with that text. An output that takes others back (`Written`) goes on from where they part: tokens
        before that whose text it takes back are told again too.
        """
        if index not in self._choices:
            self._choices[index] = self._choice(index)
        return self._choices[index].more(output)

    def whole(self, index: int, outputs: Sequence[RequestOutput]) -> list[TokenOrigin]:
        """The same of a finished choice, each token once."""
        choice = self._choice(index)
        tokens: dict[int, TokenOrigin] = {}
        for each in (one for output in outputs for one in choice.more(output)):
            if each.index in tokens:
                tokens[each.index].text += each.text
            else:
                tokens[each.index] = each
        return [tokens[place] for place in sorted(tokens)]

    def _choice(self, index: int) -> _Choice:
        return _Choice(self._tokenizer, self._before[index] if self._before else ())


@dataclass(slots=True)
class _Token:
    id: int
    index: int
    origin: Literal["draft", "target"]
    missing: int
    """How many characters of its text are not told yet."""

    def piece(self, text: str) -> TokenOrigin:
        return TokenOrigin(index=self.index, text=text, origin=self.origin)


class _Choice:
    """One answer. A detokenizer without stop strings says how long each token's text is; the text itself is the engine's."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer, self._before = tokenizer, before
        self._detokenizer = Detokenizer(tokenizer, before=before)
        self._tokens: list[_Token] = []
        self._untold: list[_Token] = []

    def more(self, output: RequestOutput) -> list[TokenOrigin]:
        if (written := output.written) is not None and not written.offline:
            self._cut(written.first_token, written.first_character)
        first_new = len(self._tokens)
        for place, token in enumerate(output.new_token_ids):
            origin: Literal["draft", "target"] = "draft" if place < output.num_accepted else "target"
            self._tokens.append(_Token(token, first_new + place, origin, len(self._detokenizer.add(token))))
        text, told = output.text_delta, []
        for each in (waiting := [*self._untold, *self._tokens[first_new:]]):
            own, text = text[: each.missing], text[each.missing :]
            each.missing -= len(own)
            if own or each.index >= first_new:
                told.append(each.piece(own))
        if text and told:  # half a character at the end of a text has become one
            told[-1].text += text
        elif text:  # and its token is known already
            told.append(self._tokens[-1].piece(text))
        self._untold = [each for each in waiting if each.missing]
        return told

    def _cut(self, tokens: int, characters: int) -> None:
        """Go back to where there were so many tokens, and so many characters told of their text."""
        del self._tokens[tokens:]
        self._detokenizer = Detokenizer(self._tokenizer, before=self._before)
        end = 0
        for each in self._tokens:
            length = len(self._detokenizer.add(each.id))
            end += length
            each.missing = min(length, max(0, end - characters))
        self._untold = [each for each in self._tokens if each.missing]
