"""What every drafter can do."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
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
    """Tokens that the target has just run, whose keys and values stand in its cache; all [n], sequences mixed.

    ``previous`` are the tokens before them, 0 before a text's first. ``tapped`` [n, taps·E] are the outputs of the layers that the
    drafter has asked for with ``taps``; None for none. The drafter is told of no token before position ``begin``; a prompt's come a
    sequence at a time, and others say 0.
    """

    slots: Tensor
    positions: Tensor
    token_ids: Tensor
    previous: Tensor
    tapped: Tensor | None = None
    begin: int = 0

    def only(self, rows: Tensor) -> VerifiedTokens:
        """Some of them."""
        tapped = None if self.tapped is None else self.tapped[rows]
        return VerifiedTokens(self.slots[rows], self.positions[rows], self.token_ids[rows], self.previous[rows], tapped, self.begin)


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
