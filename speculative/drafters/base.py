"""What every drafter can do."""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from models.config import DecoderConfig
from models.kv_cache import KVCache
from models.layers import Linear
from speculative.policy import DraftShape
from speculative.sequence import Sequence
from speculative.tree import DraftTree


class VerifiedTokens:
    """Tokens that the target has just run, whose keys and values stand in its cache, sequences mixed.

    ``rows`` [4, n]: token ids, those before them (0 before a text's first), slots and positions. ``tapped`` [n, taps·E] are the
    outputs of the layers that the drafter has asked for with ``taps``; None for none. The drafter is told of no token before
    position ``begin``; a prompt's come a text at a time, and others say 0.

    Those of a step on a CPU come as lists (``columns``), and with what is tapped of all rows that were run, of which theirs are
    ``places``: operators take them so, as making a tensor of a few numbers takes longer than what is done with them.
    """

    def __init__(
        self, rows: Tensor | list[list[int]], tapped: Tensor | None = None, begin: int = 0, places: list[int] | None = None
    ) -> None:
        self._rows, self._tapped, self.begin, self.places = rows, tapped, begin, places

    def __len__(self) -> int:
        return self._rows.shape[1] if isinstance(self._rows, Tensor) else len(self._rows[0])

    @cached_property
    def rows(self) -> Tensor:
        """All [4, n], in one tensor as making one costs more than its few numbers."""
        return self._rows if isinstance(self._rows, Tensor) else torch.tensor(self._rows)

    @property
    def columns(self) -> list[list[int]] | None:
        """The same where they came as lists."""
        return None if isinstance(self._rows, Tensor) else self._rows

    @cached_property
    def tapped(self) -> Tensor | None:
        """Of these tokens [n, taps·E]."""
        if self._tapped is None or self.places is None:
            return self._tapped
        return self._tapped.index_select(0, torch.tensor(self.places))

    @property
    def tapped_of_all(self) -> list[Tensor]:
        """Of all rows, of which ``places`` are these tokens'; [] for none."""
        return [] if self._tapped is None else [self._tapped]

    @property
    def token_ids(self) -> Tensor:
        """The tokens [n]."""
        return self.rows[0]

    @property
    def slots(self) -> Tensor:
        """Where their texts are [n]."""
        return self.rows[2]

    @property
    def positions(self) -> Tensor:
        """Where in them they stand [n]."""
        return self.rows[3]

    def within(self, slot: int) -> VerifiedTokens:
        """Those of one text, which is in this ``slot`` now."""
        rows = self.rows.clone()
        rows[2] = slot
        return VerifiedTokens(rows, self.tapped, self.begin)

    def with_taps(self, tapped: Tensor) -> VerifiedTokens:
        """The same, of which this is tapped [n, taps·E]."""
        return VerifiedTokens(self._rows, tapped, self.begin)


class TargetEnds(Protocol):
    """What drafting borrows of a target, which is all that an edge holds of one."""

    @property
    def config(self) -> DecoderConfig:
        """The whole target's sizes."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of embeddings and logits."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    @property
    def embeddings(self) -> Tensor:
        """Those of all tokens [V, E]."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids [...] -> embeddings [..., E]."""

    def head_over(self, vocabulary: Tensor | None) -> Linear:
        """The LM head cut to the token ids ``vocabulary`` [K]; None stands for all."""


def window_start(sequence: Sequence, window: int | None) -> int:
    """The first position that a drafter with this ``window`` knows of."""
    return max(sequence.drafter_start, 0 if window is None else sequence.num_prompt_tokens - window)


class Drafter(Protocol):
    """Proposes a tree for every decoding sequence.

    Sequences hold consecutive slots from 0. A drafter never sees whether its drafts were right; it learns of verified tokens, and
    of the outputs of the target's layers numbered ``taps`` (see ``Llama.forward_tapped``). Of a prompt it is told the last
    ``window`` tokens only; None: all. ``caches`` hold what it keeps of verified tokens, a row for each, as the target's cache does:
    the engine moves these rows, and keeps them for texts that begin alike, together with the target's.
    """

    name: str
    taps: tuple[int, ...]
    window: int | None
    caches: Many[KVCache]

    def extend(self, verified: VerifiedTokens, target_cache: KVCache) -> None:
        """Take note of newly verified tokens."""

    def propose(self, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache | None) -> DraftTree:
        """Draft at most ``shape.nodes`` nodes for each sequence; sequences that do not speculate get none.

        There is no ``target_cache`` where the target is elsewhere.
        """

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended; its slot goes to another."""

    def target_scratch_rows(self, shape: DraftShape) -> int:
        """Scratch rows of the target's cache that drafting itself needs."""
