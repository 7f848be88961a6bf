"""Batches of similar length by token budget, the same for the same seed and epoch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from training.data import Corpus

MULTIPLE = 16
"""Sequence lengths are rounded up to it: fewer distinct shapes, aligned masks."""

WINDOW = 64
"""Batches among which conversations are sorted by length: more pads less, fewer shuffles better."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded conversations: ``token_ids`` int64 [B, S] and ``response`` boolean [B, S], false on padding."""

    token_ids: Tensor
    response: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return Batch(self.token_ids.to(device, non_blocking=True), self.response.to(device, non_blocking=True))


def plan_batches(lengths: npt.NDArray[np.int64], token_budget: int, *, seed: int, epoch: int) -> list[npt.NDArray[np.int64]]:
    """Indices into ``lengths`` for each batch of an epoch, padding counted: count · longest ≤ ``token_budget``.

    A conversation longer than the budget is a batch by itself.
    """
    generator = np.random.default_rng((seed, epoch))
    order = generator.permutation(len(lengths))
    rounded = -(-lengths // MULTIPLE) * MULTIPLE
    window = max(1, int(WINDOW * token_budget / max(1.0, float(lengths.mean())))) if len(lengths) else 1
    batches: list[npt.NDArray[np.int64]] = []
    for start in range(0, len(order), window):
        members = order[start : start + window]
        members = members[np.argsort(rounded[members], kind="stable")]
        first = 0
        for index in range(1, len(members) + 1):
            # Ascending, so the last member is the longest.
            if index == len(members) or (index - first + 1) * rounded[members[index]] > token_budget:
                batches.append(members[first:index])
                first = index
    return [batches[index] for index in generator.permutation(len(batches))]


def collate(corpus: Corpus, indices: npt.NDArray[np.int64], max_length: int) -> Batch:
    """Pad the conversations with these indices to a common length."""
    rows = [corpus.row(int(index), max_length) for index in indices]
    longest = max(len(ids) for ids, _ in rows)
    length = -(-longest // MULTIPLE) * MULTIPLE
    token_ids = np.zeros((len(rows), length), dtype=np.int64)
    response = np.zeros((len(rows), length), dtype=np.bool_)
    for row, (ids, mask) in enumerate(rows):
        token_ids[row, : len(ids)] = ids
        response[row, : len(mask)] = mask
    return Batch(torch.from_numpy(token_ids), torch.from_numpy(response))
