"""Attention plans written out row by row: slow, and plain to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from models.attention import AttentionPlan
from models.kv_cache import KVCache


@dataclass(frozen=True)
class Row:
    """One token of one sequence: its ``position``, where it is ``stored`` and what it ``sees``.

    Places are those of ``KVCache.flat_row``: 0, 1, … for tokens, −scratch … −1 for tree nodes.
    """

    position: int
    stored: int
    sees: Sequence[int]


def chain(first: int, count: int) -> list[Row]:
    """``count`` tokens from position ``first`` on, each seeing all before it and itself."""
    return [Row(position, position, range(position + 1)) for position in range(first, first + count)]


def tree(prefix: int, parents: Sequence[int], scratch: int) -> list[Row]:
    """Tree nodes after ``prefix`` tokens; ``parents[i]`` is node i's parent, −1 at the root."""
    rows = []
    for node in range(len(parents)):
        ancestors = lineage(node, parents)
        sees = [*range(prefix), *(ancestor - scratch for ancestor in ancestors)]
        rows.append(Row(prefix + len(ancestors) - 1, node - scratch, sees))
    return rows


def lineage(node: int, parents: Sequence[int]) -> list[int]:
    """The nodes from the root down to ``node``, both included."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def plan(cache: KVCache, groups: int, sequences: Sequence[Sequence[Row]], *, first_slot: int = 0) -> AttentionPlan:
    """One sequence per slot from ``first_slot`` on; shorter ones are padded with rows that write where the longest text would end.

    ``groups`` query heads share a KV head.
    """
    rows = max(len(sequence) for sequence in sequences)
    allowed = torch.zeros(len(sequences), 1, rows, cache.rows_per_slot, dtype=torch.bool)
    allowed[..., 0] = True  # a padding row must see something: softmax over nothing is NaN
    positions, write = [], []
    for index, sequence in enumerate(sequences):
        for number, row in enumerate(sequence):
            allowed[index, 0, number] = False
            allowed[index, 0, number, [place + cache.scratch for place in row.sees]] = True
            positions.append(row.position)
            write.append(cache.flat_row(first_slot + index, row.stored))
        padding = rows - len(sequence)
        positions.extend([0] * padding)
        write.extend([cache.flat_row(first_slot + index, cache.length - 1)] * padding)
    mask = torch.zeros(allowed.shape, dtype=cache.data.dtype).masked_fill(~allowed, float("-inf"))
    return AttentionPlan(
        first_slot=first_slot,
        batch=len(sequences),
        rows=rows,
        positions=torch.tensor(positions),
        write=torch.tensor(write),
        mask=mask.repeat_interleave(groups, dim=2),
    )


def padded(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Token ids of ragged sequences, padded with 0 and flattened: [batch·rows]."""
    rows = max(len(sequence) for sequence in sequences)
    return torch.tensor([token for sequence in sequences for token in [*sequence, *[0] * (rows - len(sequence))]])
