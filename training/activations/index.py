"""What a folder of activations holds, and where in it: facts in JSON, the plan as arrays, the text itself beside them.

A folder holds one corpus: ``index.json``, ``plan.npz``, the corpus under its key, and ``shard-00000.safetensors`` and so on.
A shard has the tokens of some batches, one conversation after another without padding, a row each of ``hidden`` and the rest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from models.durable import whole
from training.batches import Collated, Indices
from training.choices import Precision
from training.corpus import Corpus
from training.errors import ConfigError, first_line
from training.needs import Needs

FORMAT = 1
"""Raise it when what is stored changes."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What activations are of, and how they were made; equal facts give equal files.

    ``target`` identifies a checkpoint (``target_digest.checkpoint_digest``), ``data`` the text as it was given and ``corpus`` what
    the target read, which are the same unless turns were regenerated. ``wanted_tokens`` of the text are kept, all where None.
    """

    target: str
    data: str
    corpus: str
    needs: Needs
    dtype: Precision
    max_length: int
    batch_tokens: int
    seed: int
    shard_bytes: int
    wanted_tokens: int | None = None
    format: int = FORMAT

    @property
    def itemsize(self) -> int:
        """Bytes a number."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def digest(self) -> str:
        """Names them in shards."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()

    @classmethod
    def read(cls, folder: Path) -> Facts:
        """Of a folder; raises ConfigError where there are none that this version reads."""
        path = folder / "index.json"
        try:
            raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if raw.get("format") != FORMAT:
                raise ConfigError(f"{path} is of format {raw.get('format')}, this version reads {FORMAT}: make them anew")
            needs = raw.pop("needs")
            return cls(**raw, needs=Needs(needs["keys_values"], needs["layer_input"], tuple(needs["taps"])))
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"{folder} holds no activations: make them with moaserve activations --out") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} is no index of activations ({error}): delete it, and run the same moaserve activations again, which "
                "writes it anew and keeps the shards; for others choose another --out"
            ) from error

    def write(self, folder: Path) -> None:
        """As ``index.json``, last of a folder's parts: where it stands the others do."""
        with whole(folder / "index.json") as path:
            path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")

    def check_same(self, folder: Path) -> None:
        """Raise ConfigError where a folder was begun with other facts."""
        earlier, mine = (dataclasses.asdict(facts) for facts in (Facts.read(folder), self))
        changed = [f"{name} was {earlier[name]!r} and is now {mine[name]!r}" for name in mine if earlier[name] != mine[name]]
        if changed:
            raise ConfigError(f"{folder} holds other activations: {'; '.join(changed)}. Choose another --out, or delete it")


class Plan:
    """Which conversations stand where: ``batches`` of them as the target runs them, ``shards`` of the batches' numbers."""

    def __init__(self, corpus: Corpus, max_length: int, batches: Sequence[Indices], shards: Sequence[range]) -> None:
        self.corpus, self.max_length, self.batches, self.shards = corpus, max_length, batches, shards

    @classmethod
    def make(cls, text: Collated, shard_tokens: float) -> Plan:
        """Shards of as many batches as have at most ``shard_tokens`` tokens, one at least."""
        lengths = text.corpus.lengths(text.max_length)
        shards, first, tokens = list[range](), 0, 0
        for number, batch in enumerate(text.plan):
            here = int(lengths[batch].sum())
            if number > first and tokens + here > shard_tokens:
                shards.append(range(first, number))
                first, tokens = number, 0
            tokens += here
        return cls(text.corpus, text.max_length, text.plan, [*shards, range(first, len(text.plan))])

    @classmethod
    def read(cls, folder: Path, corpus: Corpus, max_length: int) -> Plan:
        """What ``write`` wrote; raises ConfigError where it is damaged."""
        path = folder / "plan.npz"
        try:
            with path.open("rb") as file, np.load(file) as arrays:
                batches = np.split(arrays["conversations"], arrays["batch_ends"][:-1])
                ends = arrays["shard_ends"].tolist()
        except Exception as error:  # archives break in many ways
            raise ConfigError(
                f"{path} is damaged ({first_line(error)}): run the same moaserve activations again, which writes it anew"
            ) from error
        return cls(corpus, max_length, batches, [range(first, end) for first, end in zip([0, *ends[:-1]], ends, strict=True)])

    def write(self, folder: Path) -> None:
        """As ``plan.npz``, whole or not at all."""
        with whole(folder / "plan.npz") as path, path.open("wb") as file:
            np.savez(
                file,
                conversations=np.concatenate(self.batches),
                batch_ends=np.cumsum([len(batch) for batch in self.batches]),
                shard_ends=np.array([shard.stop for shard in self.shards]),
            )

    @cached_property
    def lengths(self) -> Indices:
        """Tokens of each conversation of the corpus, whether it is here or not."""
        return self.corpus.lengths(self.max_length)

    def tokens(self, shard: int) -> int:
        """Tokens of a shard."""
        return sum(int(self.lengths[self.batches[number]].sum()) for number in self.shards[shard])

    @cached_property
    def places(self) -> tuple[Indices, Indices]:
        """Shard and first row in it of each conversation of the corpus; −1 for those that are not here."""
        shard_of, first = (np.full(len(self.corpus), -1, dtype=np.int64) for _ in range(2))
        for number, shard in enumerate(self.shards):
            order = np.concatenate([self.batches[batch] for batch in shard])
            shard_of[order] = number
            first[order] = np.cumsum(self.lengths[order]) - self.lengths[order]
        return shard_of, first


def shard_path(folder: Path, number: int) -> Path:
    """Where a shard stands."""
    return folder / f"shard-{number:05d}.safetensors"
