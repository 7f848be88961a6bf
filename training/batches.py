"""Batches of similar length by token budget, the same for the same seed and epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from training.config import RunConfig
from training.data import Corpus
from training.errors import DataError

MULTIPLE = 16
"""Sequence lengths are rounded up to it: fewer distinct shapes, aligned masks."""

WINDOW = 64
"""Batches among which conversations are sorted by length: more pads less, fewer shuffles better."""

HELD_OUT = 1 << 20
"""Stands for the epoch in the seeds of validation batches, so that training never draws the same."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded conversations: ``token_ids`` int64 [B, S] and ``response`` boolean [B, S], false on padding."""

    token_ids: Tensor
    response: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return Batch(self.token_ids.to(device, non_blocking=True), self.response.to(device, non_blocking=True))


class Epoch(Protocol):
    """The batches of one pass over a text, made when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Batch: ...


class Conversations:
    """Whole conversations, each a row; raises DataError when no response would be left to learn from."""

    def __init__(self, corpus: Corpus, max_length: int, token_budget: int, seed: int, *, name: str) -> None:
        self.corpus, self.max_length, self.token_budget, self.seed = corpus, max_length, token_budget, seed
        self.indices = corpus.usable(max_length)
        if not len(self.indices):
            raise DataError(f"{name}: no response token within --max-length {max_length}")

    def epoch(self, number: int) -> Epoch:
        """Every usable conversation once."""
        lengths = self.corpus.lengths(self.max_length)[self.indices]
        return _Collated(self, plan_batches(lengths, self.token_budget, seed=self.seed, epoch=number))


class _Collated:
    def __init__(self, source: Conversations, plan: list[npt.NDArray[np.int64]]) -> None:
        self.source, self.plan = source, plan

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> Batch:
        source = self.source
        return collate(source.corpus, source.indices[self.plan[index]], source.max_length)


def conversations(config: RunConfig, corpus: Corpus, valid: Corpus | None) -> tuple[Conversations, list[Batch]]:
    """What is trained on, and the held-out batches: the same every time, drawn over all of ``valid``, ``valid_tokens`` of them."""
    length, budget = config.max_length, config.batch_tokens
    source = Conversations(corpus, length, budget, config.seed, name=config.data)
    if valid is None:
        return source, []
    epoch, batches = Conversations(valid, length, budget, 0, name=str(config.valid)).epoch(HELD_OUT), list[Batch]()
    while len(batches) < len(epoch) and sum(batch.token_ids.numel() for batch in batches) < config.valid_tokens:
        batches.append(epoch[len(batches)])
    return source, batches


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
