"""Text to tokens, and what single tokens stand for."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from tokenizers import Tokenizer

from app.errors import InvalidParameterError
from speculative.errors import ContextLengthError


def encoded(tokenizer: Any, text: str, param: str, *, add_special_tokens: bool = True) -> list[int]:
    """The token ids of what the caller gave as ``param``."""
    try:
        ids: list[int] = tokenizer.encode(text, verbose=False, add_special_tokens=add_special_tokens)
    except Exception as error:  # JSON can carry half a surrogate pair, which is not text
        raise InvalidParameterError(f"The {param} cannot be tokenized: {error}", param=param) from error
    return ids


FAR_TOO_LONG: Final = 2
"""Contexts that the beginning of a text fills alone: however the rest goes on, the whole does not fit into one."""

CHARACTERS: Final = 8
"""A token has fewer, on average, in all but a few texts."""


def beginning(text: str, most: int) -> str:
    """As much of a text as has more than ``most`` tokens, but for a few texts; all of it where it is shorter."""
    return text[: FAR_TOO_LONG * CHARACTERS * most]


def check_length(tokenizer: Any, text: str, param: str, most: int) -> None:
    """Refuse a text that is far longer than ``most`` tokens by its beginning: tokenizing a megabyte takes a second.

    Raises ContextLengthError.
    """
    first = beginning(text, most)
    if len(first) == len(text):
        return
    if (count := len(encoded(tokenizer, first, param))) >= FAR_TOO_LONG * most:
        raise ContextLengthError(
            f"This model's maximum context length is {most} tokens. However, your text is too long: "
            f"the first {len(first)} of its {len(text)} characters alone are {count} tokens.",
            param=param,
        )


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
