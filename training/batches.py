"""Batches of similar length by token budget, the same for the same seed and epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from models.llama import TargetActivations
from training.corpus import Corpus
from training.errors import DataError
from training.run_config import TextConfig

MULTIPLE = 16
"""Sequence lengths are rounded up to it: fewer distinct shapes, aligned masks."""

WINDOW = 64
"""Batches among which conversations are sorted by length: more pads less, fewer shuffles better."""

Indices = npt.NDArray[np.int64]
"""Numbers of conversations in a corpus."""

HELD_OUT = 1 << 20
"""Stands for the epoch in the seeds of validation batches, so that training never draws the same."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded conversations: ``token_ids`` int64 [B, S] and ``response`` boolean [B, S], false on padding.

    ``activations`` are what the target makes of them, where that was kept; zeros on padding.
    """

    token_ids: Tensor
    response: Tensor
    activations: TargetActivations | None = None

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        kept = None if self.activations is None else self.activations.to(device)
        return Batch(self.token_ids.to(device, non_blocking=True), self.response.to(device, non_blocking=True), kept)


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

    def epoch(self, number: int) -> Collated:
        """Every usable conversation once."""
        lengths = self.corpus.lengths(self.max_length)[self.indices]
        plan = plan_batches(lengths, self.token_budget, seed=self.seed, epoch=number)
        return Collated(self.corpus, self.max_length, [self.indices[batch] for batch in plan])


@dataclass(frozen=True, slots=True)
class Collated:
    """Planned batches of conversations' indices, read when they are asked for."""

    corpus: Corpus
    max_length: int
    plan: Sequence[Indices]

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> Batch:
        return collate(self.corpus, self.plan[index], self.max_length)

    def first(self, tokens: int) -> Collated:
        """As many of the first batches as have at least ``tokens`` tokens together, padding included."""
        lengths = self.corpus.lengths(self.max_length)
        sizes = np.array([len(batch) * padded_length(int(lengths[batch].max())) for batch in self.plan])
        count = int(np.searchsorted(np.cumsum(sizes), tokens)) + 1
        return Collated(self.corpus, self.max_length, self.plan[:count])


def conversations(config: TextConfig, corpus: Corpus, valid: Corpus | None) -> tuple[Conversations, Collated]:
    """What is trained on, and the held-out batches: the same every time, drawn over all of ``valid``, ``valid_tokens`` of them.

    Of held-out conversations whose activations were kept, the batches are those that they were kept in.
    """
    length, budget = config.max_length, config.batch_tokens
    source = Conversations(corpus, length, budget, config.seed, name=config.data or str(config.out))
    if valid is None:
        return source, Collated(corpus, length, [])
    if valid.activations is not None:
        held_out = Collated(valid, length, valid.activations.batches)
    else:
        held_out = Conversations(valid, length, budget, 0, name=str(config.valid)).epoch(HELD_OUT)
    return source, held_out.first(config.valid_tokens)


def plan_batches(lengths: npt.NDArray[np.int64], token_budget: int, *, seed: int, epoch: int) -> list[Indices]:
    """Indices into ``lengths`` for each batch of an epoch, padding counted: count · longest ≤ ``token_budget``.

    A conversation longer than the budget is a batch by itself.
    """
    generator = np.random.default_rng((seed, epoch))
    order = generator.permutation(len(lengths))
    rounded = padded_length(lengths)
    window = max(1, int(WINDOW * token_budget / max(1.0, float(lengths.mean())))) if len(lengths) else 1
    batches: list[Indices] = []
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


_Length = TypeVar("_Length", int, Indices)


def padded_length(length: _Length) -> _Length:
    """A whole number of MULTIPLEs."""
    return -(-length // MULTIPLE) * MULTIPLE


def collate(corpus: Corpus, indices: Indices, max_length: int) -> Batch:
    """Pad the conversations with these indices to a common length."""
    rows = [corpus.row(int(index), max_length) for index in indices]
    length = padded_length(max(len(ids) for ids, _ in rows))
    token_ids = np.zeros((len(rows), length), dtype=np.int64)
    response = np.zeros((len(rows), length), dtype=np.bool_)
    for row, (ids, mask) in enumerate(rows):
        token_ids[row, : len(ids)] = ids
        response[row, : len(mask)] = mask
    activations = None
    if corpus.activations is not None:
        activations = corpus.activations.read(indices, [len(ids) for ids, _ in rows], length)
    return Batch(torch.from_numpy(token_ids), torch.from_numpy(response), activations)
