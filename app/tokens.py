"""Text to tokens, and what single tokens stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tokenizers import Tokenizer

from app.errors import InvalidParameterError
from speculative.detokenizer import Detokenizer
from speculative.errors import ContextLengthError


def encoded(tokenizer: Any, text: str, param: str, *, add_special_tokens: bool = True) -> list[int]:
    """The token ids of what the caller gave as ``param``."""
    try:
        ids: list[int] = tokenizer.encode(text, verbose=False, add_special_tokens=add_special_tokens)
    except BaseException as error:  # JSON can carry half a surrogate pair, which is not text; and what is in Rust may panic
        raise InvalidParameterError(f"The {param} cannot be tokenized: {error}", param=param) from error
    return ids


FAR_TOO_LONG: Final = 2
"""Contexts that the beginning of a text fills alone: however the rest goes on, the whole does not fit into one."""

CHARACTERS: Final = 8
"""A token has fewer, on average, in all but a few texts."""


def beginning(text: str, most: int) -> str:
    """As much of a text as has more than ``most`` tokens, but for a few texts; all of it where it is shorter."""
    return text[: _stretch(most)]


def check_length(tokenizer: Any, text: str, param: str, most: int) -> None:
    """Refuse a text that is far longer than ``most`` tokens by its beginning: tokenizing a megabyte takes a second.

    It goes on by stretches until these are far too many tokens: a text may begin with spaces, of which a token has many.
    Raises ContextLengthError.
    """
    size, count = _stretch(most), 0
    if len(text) <= size:
        return
    for number, start in enumerate(range(0, len(text), size)):
        count += len(encoded(tokenizer, text[start : start + size], param, add_special_tokens=False))
        if count - number >= FAR_TOO_LONG * most:  # a token that a stretch cuts counts twice
            raise ContextLengthError(
                f"This model's maximum context length is {most} tokens. However, your text is too long: "
                f"the first {min(start + size, len(text))} of its {len(text)} characters alone are {count} tokens.",
                param=param,
            )


def _stretch(most: int) -> int:
    """Characters that are tokenized before it is looked at how many tokens they are."""
    return FAR_TOO_LONG * CHARACTERS * most


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_of_character() -> dict[str, int]:
    """Byte-level vocabularies write each byte as a printable character; those that are none come after U+0100 (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


class TokenTexts:
    """Texts and bytes of a Hugging Face tokenizer's tokens; a token may be part of a character only."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer: Tokenizer = tokenizer.backend_tokenizer
        decoder = self._tokenizer.decoder
        state = json.loads(decoder.__getstate__()) if decoder is not None else {}
        kinds = {part["type"] for part in (state, *state.get("decoders", ())) if "type" in part}
        self._byte_level = _byte_of_character() if "ByteLevel" in kinds else None
        self._added = {token_id: token.content for token_id, token in self._tokenizer.get_added_tokens_decoder().items()}

    def bytes(self, token_id: int) -> bytes:
        """The token's UTF-8; empty for ids that models have beyond their tokenizer's."""
        if token_id in self._added:
            content: str = self._added[token_id]
            return content.encode()
        token = self._tokenizer.id_to_token(token_id) or ""
        if self._byte_level is not None:
            return bytes(self._byte_level[character] for character in token)
        if match := _BYTE.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("▁", " ").encode()

    def text(self, token_id: int) -> str:
        """The same as text, with U+FFFD for what is not a whole character."""
        return self.bytes(token_id).decode(errors="replace")

    def offsets(self, before: Sequence[int] = ()) -> TokenOffsets:
        """Of a text that begins, or goes on from tokens ``before`` it."""
        return TokenOffsets(self._tokenizer, self._added, before)


class TokenOffsets:
    """Where the tokens of one text begin, in characters: a character's bytes all where it begins.

    Special tokens have no text, but where a prompt spells them out. Generated tokens go on from those ``before`` them.
    """

    def __init__(self, tokenizer: Tokenizer, added: Mapping[int, str], before: Sequence[int] = ()) -> None:
        self._tokenizer, self._added, self._before = tokenizer, added, before
        self._begin(0)

    def of_prompt(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Those of a prompt and its text; what comes next is behind it."""
        offsets, detokenizer = [], Detokenizer(self._tokenizer)
        for token in token_ids:
            offsets.append(min(self._end, len(text)))
            name = self._added.get(token, "")
            told = len(detokenizer.add(token))
            self._end += told or (len(name) if name and text.startswith(name, self._end) else 0)
        self._begin(len(text))
        return offsets

    def more(self, token_ids: Sequence[int]) -> list[int]:
        """Those of generated tokens, the next ones."""
        offsets = []
        for token in token_ids:
            offsets.append(self._end)
            self._end += len(self._detokenizer.add(token))
        self._generated += token_ids
        return offsets

    def cut(self, count: int) -> None:
        """Take back all but so many generated tokens."""
        kept = self._generated[:count]
        self._begin(self._start)
        self.more(kept)

    def _begin(self, start: int) -> None:
        self._start = self._end = start
        self._generated: list[int] = []
        self._detokenizer = Detokenizer(self._tokenizer, before=self._before)
