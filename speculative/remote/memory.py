"""A drafter's memory for those who draft elsewhere: read where the engine has computed it."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many

import torch

from speculative.config import MEMORY_FORMATS, MemoryFormat
from speculative.drafters.base import Drafter, window_start
from speculative.drafters.eagle import EagleDrafter
from speculative.drafters.moa import MoADrafter
from speculative.drafters.wrapper import innermost
from speculative.remote.memory_codec import MemoryCodec
from speculative.request import Memory
from speculative.sequence import Sequence


class MemoryReader:
    """Hands out what ``drafter`` remembers of texts, each row once.

    Of an EAGLE drafter that is the features of all tokens; where there is no drafter nobody needs more than the tokens.
    """

    def __init__(self, drafter: MoADrafter | EagleDrafter | None) -> None:
        self._drafter = drafter
        self._codecs = {} if drafter is None else {format: _codec(drafter, format) for format in MEMORY_FORMATS}

    @classmethod
    def of(cls, drafter: Drafter | None) -> MemoryReader | None:
        """None for a drafter whose memory nobody can use elsewhere: n-grams have none, borrowed layers are the target's."""
        inner = innermost(drafter)
        if inner is None or isinstance(inner, EagleDrafter) or (isinstance(inner, MoADrafter) and not inner.borrowed):
            return cls(inner)
        return None

    @property
    def bytes_by_format(self) -> dict[MemoryFormat, tuple[int, int]]:
        """Bytes of a verified token and of the newest memory."""
        if self._drafter is None:
            return dict.fromkeys(MEMORY_FORMATS, (0, 0))
        return {format: (codec.bytes_per_token, codec.newest_bytes) for format, codec in self._codecs.items()}

    def read(self, sequences: Many[Sequence]) -> list[Memory | None]:
        """What is known of each text and has not been read before; None for one that has ended or wants none, or if nothing is."""
        told: list[Memory | None] = [None] * len(sequences)
        by_format: dict[MemoryFormat, list[tuple[int, Sequence, int]]] = {}
        for index, sequence in enumerate(sequences):
            wanted = sequence.request.memory
            if wanted is not None and self._drafter is not None and sequence.finish_reason is None:
                first = max(sequence.memory_end, sequence.request.memory_from, window_start(sequence, self._drafter.sent_window))
                if first < sequence.num_computed:
                    by_format.setdefault(wanted, []).append((index, sequence, first))
        for format, wanting in by_format.items():
            for (index, sequence, first), (rows, newest) in zip(wanting, self._encoded(format, wanting), strict=True):
                told[index] = Memory(first, rows, newest)
                sequence.memory_end = sequence.num_computed
        return told

    def _encoded(self, format: MemoryFormat, wanting: list[tuple[int, Sequence, int]]) -> Iterator[tuple[bytes, bytes]]:
        """Rows and newest memory of several texts; encoded all at once, as each operation costs more than what it computes."""
        assert self._drafter is not None
        codec, drafter = self._codecs[format], self._drafter
        if isinstance(drafter, MoADrafter):
            drafter.pair_newest([sequence for _, sequence, _ in wanting])
        parts = [drafter.memory(sequence.slot, first, sequence.num_computed) for _, sequence, first in wanting]
        encoded = codec.rows.encode(torch.cat([rows for rows, _ in parts]))
        newest = [last for _, last in parts if last is not None]
        last = codec.newest.encode(torch.cat(newest)) if codec.newest is not None and newest else b""
        at = 0
        for number, (rows, _) in enumerate(parts):
            size = len(rows) * codec.bytes_per_token
            yield encoded[at : at + size], last[number * codec.newest_bytes : (number + 1) * codec.newest_bytes]
            at += size


def _codec(drafter: MoADrafter | EagleDrafter, format: MemoryFormat) -> MemoryCodec:
    if isinstance(drafter, EagleDrafter):
        return MemoryCodec.of_hidden(drafter.eagle.config.target, format)
    return MemoryCodec.of(drafter.config, format)
