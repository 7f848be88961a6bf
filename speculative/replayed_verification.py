"""The target's pass over a step's trees as one recorded graph."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
import torch.nn.functional as F
from torch import Tensor

from models.attention import AttentionPlan
from models.kv_cache import KVCache
from models.llama import Llama
from models.plans import counting, decode_plan_within, recorded_span
from models.replay import Recorder, Replayed, rounded
from speculative.batch import TreeLayout, in_scratch_rows, token_ids_of
from speculative.sampling import argmax
from speculative.sequence import Sequence
from speculative.tree import DraftTree

_ROWS = 4
"""Trees are recorded with multiples of so many rows: on a GPU some rows more cost nothing."""


class ReplayedVerification:
    """Where trees stand, embeddings, layers, LM head and each row's best token, recorded for few sizes of batch, tree and text.

    What is missing to such a size is padded: trees with children of the root, batches with texts that end where no text ends.
    """

    def __init__(self, target: Llama, cache: KVCache, taps: tuple[int, ...], record: Recorder) -> None:
        self._target, self._cache, self._taps = target, cache, taps
        self._layout = TreeLayout(cache, target.config.groups)
        self._replayed = Replayed(record)
        vocab_size, dtype = target.config.vocab_size, target.dtype
        self._logits = torch.empty(cache.num_slots * cache.scratch, vocab_size, dtype=dtype, device=cache.data.device)

    def __len__(self) -> int:
        """Recordings that there are."""
        return len(self._replayed)

    def suits(self, batch: Many[Sequence], tree: DraftTree) -> bool:
        """Whether these texts, in consecutive slots, and trees are such as are recorded: all go on, from the first slot."""
        return not batch[0].slot and in_scratch_rows(self._cache, batch, tree)

    def __call__(
        self, roots: list[int], tree: DraftTree, lengths: list[int], first_slot: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As in TreePass; ``first_slot`` is 0."""
        cache, batch, rows = self._cache, len(roots), tree.num_rows
        token_ids = token_ids_of(roots, tree, cache.data.device)
        texts = rounded(batch, cache.num_slots)
        most = 1 if rows == 1 else min(-(-rows // _ROWS) * _ROWS, cache.scratch)
        span = recorded_span(cache, max(lengths) + (rows == 1))
        # A slot's last place is never taken, as the token that would stand there ends its text.
        ends = torch.tensor(lengths + [cache.length - 1] * (texts - batch))
        inputs = [_filled(token_ids, texts, most), _filled(tree.parents, texts, most - 1), ends]
        kind = (texts, most, span)
        outputs = self._replayed(kind, lambda inputs: self._run(inputs, span), inputs, cache.data.device)
        logits, best, *tapped = (each[:batch, :rows] for each in outputs)
        return logits, best, tapped[0].flatten(0, 1) if tapped else None

    def _run(self, inputs: list[Tensor], span: int) -> list[Tensor]:
        token_ids, parents, lengths = inputs
        target, cache, (texts, rows) = self._target, self._cache, token_ids.shape
        if rows == 1:
            plan = decode_plan_within(cache, target.config.groups, lengths, span)
        else:
            positions, write, mask = self._layout(parents, lengths, counting(span, lengths.device))
            plan = AttentionPlan(0, texts, rows, positions.flatten(), write.flatten(), mask)
        hidden, tapped = target.forward_tapped(token_ids.flatten(), plan, cache, self._taps)
        # Each recording keeps its outputs: of logits, which are large, all share these.
        logits = self._logits[: texts * rows].copy_(target.logits(hidden))
        return [each.unflatten(0, (texts, rows)) for each in (logits, argmax(logits), *(() if tapped is None else (tapped,)))]


def _filled(numbers: Tensor, rows: int, columns: int) -> Tensor:
    """With zeros below and behind."""
    missing = columns - numbers.shape[1], rows - numbers.shape[0]
    return F.pad(numbers, (0, missing[0], 0, missing[1])) if any(missing) else numbers
