"""Telling the drafter of what has been verified: at once where it drafts, and later, if at all, where it does not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from models.kv_cache import KVCache
from models.llama import Later
from speculative.acceptance import keep_paths
from speculative.backlog import Backlog, with_taps
from speculative.drafters.base import Drafter, VerifiedTokens, window_start
from speculative.sequence import Sequence
from speculative.tree import DraftTree
from speculative.verification import Acceptance


class Telling:
    """What of the target's work ``drafter`` (None: nobody) is told of, whose keys and values stand in ``cache``.

    ``drafting`` says whether the latest step drafted: if not, news wait in a backlog.
    """

    def __init__(self, drafter: Drafter | None, cache: KVCache) -> None:
        self.drafter, self._cache = drafter, cache
        self._window = drafter.window if drafter is not None else None
        self._backlog = Backlog(can_skip=self._window is not None)
        self.drafting = True

    def catch_up(self, before: Callable[[], None] = lambda: None) -> bool:
        """Tell of a portion of what has waited, as drafting is to begin anew, and call ``before`` first; whether anything had."""
        waited = self._backlog.waits
        if waited:
            before()
        self._tell(*self._backlog.take_portion())
        self.drafting = not self._backlog.waits
        return waited

    def first_told(self, sequence: Sequence, start: int) -> int:
        """Of a stretch of a prompt that begins at ``start``, the first token that the drafter is told of; none may be as far."""
        if self.drafter is None or not sequence.speculative:
            return len(sequence.tokens)
        return max(0, window_start(sequence, self._window) - start)

    def of_prompt(self, sequence: Sequence, token_ids: Tensor, positions: Tensor, tapped: Later | None) -> None:
        """A stretch of a prompt was read: its tokens and their positions [n], and what brings the last ones' taps [≤ n, taps·E].

        Of the last stretch nothing is told before ``settle``: the first token need not wait for that. What is sent elsewhere is
        wanted now.
        """
        start = sequence.num_computed - len(token_ids)
        first = self.first_told(sequence, start)
        told = len(token_ids) - first
        if told <= 0:
            return
        previous = torch.cat((token_ids.new_tensor([sequence.token_before(start)]), token_ids[:-1]))
        slots = token_ids.new_full((told,), sequence.slot)
        rows = torch.stack((token_ids[first:], previous[first:], slots, positions[first:]))
        verified = VerifiedTokens(rows, begin=window_start(sequence, self._window))
        of_told: Later | None = None if tapped is None else lambda: tapped()[-told:]
        is_last = sequence.num_computed == sequence.num_given_tokens
        if sequence.request.remote or (self.drafting and not is_last):
            self._tell(*self._backlog.take(), with_taps(verified, of_told))
        else:
            self._backlog.add_prompt(sequence, verified, of_told)

    def settle(self) -> bool:
        """First tokens of prompts are out: tell of these, unless nothing is drafted anyway; whether anything was told."""
        told = self.drafting and self._backlog.waits
        if told:
            self._tell(*self._backlog.take())
        return told

    def of_step(self, batch: list[Sequence], tree: DraftTree, accepted: list[Acceptance], tapped: Tensor | None) -> None:
        """Trees were verified: keep the keys and values of accepted paths, and tell of them; tapped [B·(N+1), taps·E]."""
        if not self.drafting and not any(sequence.request.remote for sequence in batch):
            # What a recorded pass tapped holds until the next one only.
            self._backlog.add_step(batch, None if tapped is None else tapped.clone())
        elif verified := keep_paths(self._cache, batch, tree, accepted, tapped):
            self._tell(*self._backlog.take(), verified)

    def after_step(self) -> None:
        """Tell of what has waited too long; the texts' lengths must be what they are after the step."""
        while self._backlog.full:
            self._tell(*self._backlog.take_portion())

    def forget(self, sequence: Sequence) -> None:
        """It has ended: of its prompt nothing need be told."""
        self._backlog.forget(sequence)

    def _tell(self, *verified: VerifiedTokens) -> None:
        if self.drafter is not None:
            for tokens in verified:
                self.drafter.extend(tokens, self._cache)
