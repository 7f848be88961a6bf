"""What every drafter can do."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from models.config import DecoderConfig
from models.kv_cache import KVCache
from models.layers import Linear
from speculative.policy import DraftShape
from speculative.sequence import Sequence
from speculative.tree import DraftTree


@dataclass(frozen=True, slots=True)
class VerifiedTokens:
    """Tokens that the target has just run, whose keys and values stand in its cache, sequences mixed.

    ``rows`` [4, n], in one tensor as making one costs more than its few numbers: token ids, those before them (0 before a text's
    first), slots and positions. ``tapped`` [n, taps·E] are the outputs of the layers that the drafter has asked for with ``taps``;
    None for none. The drafter is told of no token before position ``begin``; a prompt's come a text at a time, and others say 0.
    """

    rows: Tensor
    tapped: Tensor | None = None
    begin: int = 0

    def __len__(self) -> int:
        return self.rows.shape[1]

    @property
    def token_ids(self) -> Tensor:
        """The tokens [n]."""
        return self.rows[0]

    @property
    def previous(self) -> Tensor:
        """Those before them [n]."""
        return self.rows[1]

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
        return replace(self, rows=rows)

    def only(self, places: Tensor) -> VerifiedTokens:
        """Some of them."""
        return VerifiedTokens(self.rows[:, places], None if self.tapped is None else self.tapped[places], self.begin)


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
