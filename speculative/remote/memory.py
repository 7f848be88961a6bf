"""A drafter's memory for those who draft elsewhere: read where the engine has computed it."""

from __future__ import annotations

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

    def read(self, sequence: Sequence) -> Memory | None:
        """What is known of a text and has not been read before; None for a request that wants no memory."""
        wanted = sequence.request.memory
        if wanted is None or self._drafter is None:
            return None
        first = max(sequence.memory_end, sequence.request.memory_from, window_start(sequence, self._drafter.window))
        if first >= sequence.num_computed:
            return None
        rows, newest = self._drafter.memory(sequence.slot, first, sequence.num_computed)
        sequence.memory_end = sequence.num_computed
        codec = self._codecs[wanted]
        last = codec.newest.encode(newest) if codec.newest is not None and newest is not None else b""
        return Memory(first, codec.rows.encode(rows), last)


def _codec(drafter: MoADrafter | EagleDrafter, format: MemoryFormat) -> MemoryCodec:
    if isinstance(drafter, EagleDrafter):
        return MemoryCodec.of_hidden(drafter.eagle.config.target, format)
    return MemoryCodec.of(drafter.config, format)
