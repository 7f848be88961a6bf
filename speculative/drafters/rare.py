"""Rare tokens: those of a text that the draft vocabulary lacks, which are drafted where they have been seen.

A draft vocabulary holds what texts say most, and ends every draft that comes to a name or a number. Most of those stand in the text
already: a few more outputs of the head, other ones for each text, let drafters repeat them.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch
from torch import Tensor

from speculative.sequence import Sequence

MOST_RARE = 64
"""Of how many rare tokens of a text the drafter's head has outputs: the newest."""

NONE = -1
"""What stands in the place of a token where a text has fewer."""


@dataclass(slots=True)
class _Text:
    """The rare ``tokens`` of a text, the newest last, up to where ``source`` has been ``read``."""

    source: list[int]
    tokens: dict[int, None] = field(default_factory=dict)
    read: int = 0


class RareTokens:
    """The rare tokens of texts by what is no part of a draft ``vocabulary``; ``forget`` texts that have ended."""

    def __init__(self, vocabulary: Tensor) -> None:
        self._frequent = frozenset(vocabulary.tolist())
        self._texts: dict[str, _Text] = {}

    def of(self, sequences: Many[Sequence]) -> list[list[int]]:
        """Each text's, MOST_RARE at most."""
        return [list(self._read(sequence)) for sequence in sequences]

    def forget(self, sequence: Sequence) -> None:
        """Its text has ended."""
        self._texts.pop(sequence.request.request_id, None)

    def _read(self, sequence: Sequence) -> dict[int, None]:
        tokens = sequence.tokens
        text = self._texts.get(sequence.request.request_id)
        if text is None or text.source is not tokens or text.read > len(tokens):  # an edge takes back what was foreseen
            text = self._texts[sequence.request.request_id] = _Text(tokens)
        for token in tokens[text.read :]:
            if token not in self._frequent:
                text.tokens.pop(token, None)
                text.tokens[token] = None
                if len(text.tokens) > MOST_RARE:
                    del text.tokens[next(iter(text.tokens))]
        text.read = len(tokens)
        return text.tokens


def in_one_tensor(rare: Many[list[int]], width: int | None = None) -> Tensor:
    """Texts' rare tokens [B, M], NONE behind those of texts with fewer; M is the most that a text has, or ``width``."""
    most = max(map(len, rare)) if width is None else width
    filled = [tokens + [NONE] * (most - len(tokens)) for tokens in rare]
    return torch.tensor(filled, dtype=torch.long).view(len(rare), most)
