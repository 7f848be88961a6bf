"""Tokenised conversations, and where they are kept on disk: each corpus a folder, whole or absent."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from models.durable import flush, workshop
from training.errors import DataError, first_line
from training.needs import Activations

Row = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]
"""Token ids and response mask of one conversation, each [S]."""

PREFIX = ".corpus-"
"""Of folders in which corpora are being written."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokenised conversations, end to end: number i is rows ``offsets[i]`` … ``offsets[i + 1]`` of the flat arrays.

    ``tokens`` int32 and ``response`` bool, both [total]; ``response`` is true on the tokens that an assistant wrote, the
    end-of-turn token included. ``key`` identifies text, tokenizer and template; ``activations`` are the target's where they were
    kept. ``left_out`` conversations of the text have no assistant turn, and are not here; earlier versions did not keep that.
    """

    tokens: npt.NDArray[np.int32]
    response: npt.NDArray[np.bool_]
    offsets: npt.NDArray[np.int64]
    key: str
    activations: Activations | None = None
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self, max_length: int) -> npt.NDArray[np.int64]:
        """Tokens of each conversation after truncation [len]."""
        return np.minimum(np.diff(self.offsets), max_length)

    def usable(self, max_length: int) -> npt.NDArray[np.int64]:
        """Indices of the conversations in which some response is left to learn from after truncation."""
        ends = np.concatenate(([0], np.cumsum(self.response, dtype=np.int64)))
        starts = self.offsets[:-1]
        # A response token teaches the token after it, so one alone teaches nothing.
        return np.flatnonzero(ends[starts + self.lengths(max_length)] - ends[starts] >= 2)

    def frequent_response_tokens(self, count: int) -> npt.NDArray[np.int64]:
        """The ids of the ``count`` tokens that responses use most, the most frequent first."""
        counts = np.bincount(self.tokens[self.response])
        return np.argsort(-counts, kind="stable")[:count].astype(np.int64)

    def response_share(self, tokens: npt.NDArray[np.int64]) -> float:
        """How much of what responses say is said with these token ids, 0 to 1."""
        return float(np.isin(self.tokens[self.response], tokens).mean())

    def row(self, index: int, max_length: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Token ids and response mask of one conversation, each [S ≤ max_length]."""
        start = int(self.offsets[index])
        end = min(int(self.offsets[index + 1]), start + max_length)
        return self.tokens[start:end], self.response[start:end]


def stored(folder: Path) -> Corpus:
    """A corpus that ``store`` wrote; its folder's name is its key. Raises DataError where it is damaged."""
    try:
        tokens, response, offsets = (np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("tokens", "response", "offsets"))
        if not len(tokens) == len(response) == offsets[-1]:
            raise ValueError(f"{len(tokens)} tokens, {len(response)} marks and {offsets[-1]} in all")
        left_out = folder / "left_out.npy"
        return Corpus(tokens, response, offsets, folder.name, left_out=int(np.load(left_out)) if left_out.exists() else 0)
    except Exception as error:  # NumPy says of damaged headers whatever their parser says
        raise DataError(f"the tokenised text in {folder} is damaged: {first_line(error)}") from error


def kept(folder: Path, *, tell: bool = False) -> Corpus | None:
    """As ``stored``; None where there is none, or a damaged one, of which ``tell`` says that it is made anew."""
    if not folder.exists():
        return None
    try:
        return stored(folder)
    except DataError as error:
        if tell:
            print(f"{error}; it is made anew", file=sys.stderr)
        return None


def store(rows: Sequence[Row], folder: Path, *, left_out: int = 0) -> None:
    """Write the arrays beside their place and move them in whole, so that a cache entry is complete or absent.

    There may be no rows, as in one process's share. A damaged corpus is replaced.
    """
    arrays = {
        "tokens": np.concatenate([np.empty(0, np.int32), *(ids for ids, _ in rows)]),
        "response": np.concatenate([np.empty(0, np.bool_), *(mask for _, mask in rows)]),
        "offsets": np.cumsum([0, *(len(ids) for ids, _ in rows)], dtype=np.int64),
        "left_out": np.array(left_out, dtype=np.int64),
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with workshop(folder.parent, PREFIX) as temporary:
        for name, array in arrays.items():
            np.save(temporary / f"{name}.npy", array)
            flush(temporary / f"{name}.npy")
        if kept(folder) is None:
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(temporary, folder)


def store_copy(corpus: Corpus, folder: Path) -> None:
    """Keep a corpus in another folder too, under its key."""
    place = folder / corpus.key
    if kept(place, tell=True) is None:
        store([corpus.row(index, 1 << 62) for index in range(len(corpus))], place, left_out=corpus.left_out)
