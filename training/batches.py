"""Batches by token budget, the same for the same seed and epoch: conversations of similar length, or rows all of one length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

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


class BatchSource(Protocol):
    """A text as batches."""

    def epoch(self, number: int) -> Epoch:
        """Pass ``number`` over the text, in an order of its own."""


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


class Packed:
    """Conversations end to end, ``separator`` after each, cut into rows of ``length`` tokens wherever those end."""

    def __init__(self, corpus: Corpus, length: int, token_budget: int, seed: int, *, separator: int, name: str) -> None:
        self.corpus, self.length, self.seed, self.separator = corpus, length, seed, separator
        self.rows = max(1, token_budget // length)
        if len(corpus.tokens) + len(corpus) < self.rows * length:
            raise DataError(f"{name}: fewer tokens than a batch of {self.rows} × --max-length {length}")

    def epoch(self, number: int) -> Epoch:
        """Every conversation once, but for what is left after the last whole batch."""
        corpus, order = self.corpus, np.random.default_rng((self.seed, number)).permutation(len(self.corpus))
        end = np.array([self.separator], dtype=corpus.tokens.dtype), np.array([False])
        parts = [part for index in order for part in (corpus.row(int(index), len(corpus.tokens)), end)]
        tokens, response = (np.concatenate(column) for column in zip(*parts, strict=True))
        size = self.rows * self.length
        count = len(tokens) // size
        return _Rows(*(x[: count * size].reshape(count, self.rows, self.length) for x in (tokens, response)))


@dataclass(frozen=True, slots=True)
class _Rows:
    tokens: npt.NDArray[np.int32]
    response: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Batch:
        return Batch(torch.from_numpy(self.tokens[index].astype(np.int64)), torch.from_numpy(self.response[index].copy()))


def held_out(source: BatchSource, tokens: int) -> list[Batch]:
    """The same batches every time, drawn over the whole of a held-out text, about ``tokens`` of them."""
    epoch, batches = source.epoch(HELD_OUT), list[Batch]()
    while len(batches) < len(epoch) and sum(batch.token_ids.numel() for batch in batches) < tokens:
        batches.append(epoch[len(batches)])
    return batches


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
