"""Beginnings of texts that were computed before: found when a sequence begins, kept when it has run."""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import takewhile

from models.kv_blocks import KVBlocks
from models.kv_cache import KVCache
from speculative.drafters.base import window_start
from speculative.kv_bytes import BlockFormat, Contents
from speculative.prefix_cache import BLOCK_TOKENS, PrefixCache, extend_keys
from speculative.sequence import Sequence

PORTION_BLOCKS = 16
"""Blocks that are copied at once where running texts wait: a fraction of a step."""

_PORTION_TOKENS = PORTION_BLOCKS * BLOCK_TOKENS


class Prefixes:
    """The rows of ended texts in all ``caches``, the target's and the drafter's, ``num_tokens`` in all; 0: none.

    ``window`` is the drafter's: where it has none, it has to know the whole text. While it is ``paused`` nothing is found or kept.
    """

    def __init__(self, caches: Many[KVCache], num_tokens: int, window: int | None) -> None:
        self.index = PrefixCache(num_tokens // BLOCK_TOKENS)
        self._blocks = KVBlocks(caches, self.index.num_blocks, BLOCK_TOKENS)
        self.format = BlockFormat(self._blocks.empty_block())
        self._window = window
        self.paused = False
        self._drafter_keeps_rows = len(caches) > 1

    def reuse(self, sequence: Sequence) -> None:
        """Fill the slot of a sequence that begins with what is known of its prompt; the last token is always computed."""
        if self.paused or sequence.request.params.prompt_logprobs is not None:
            return  # log-probabilities are computed with the prompt, and not kept
        blocks = self.index.match(self._keys(sequence, sequence.tokens[:-1]))
        if sequence.speculative and self._window is None:
            blocks = list(takewhile(lambda block: block.drafted, blocks))
        if not blocks:
            return
        self._blocks.load([block.number for block in blocks], sequence.slot)
        sequence.num_computed = sequence.num_cached = len(blocks) * BLOCK_TOKENS
        missing = next((n for n, block in enumerate(reversed(blocks)) if not block.drafted), len(blocks))
        sequence.drafter_start = sequence.num_cached - missing * BLOCK_TOKENS

    def keep_portion(self, sequence: Sequence, start: int) -> None:
        """A prompt was read from ``start`` on: keep it a portion at a time, as copying a long one at once holds up others."""
        if sequence.num_computed // _PORTION_TOKENS > start // _PORTION_TOKENS:
            self.keep(sequence)

    def keep(self, sequence: Sequence) -> None:
        """Copy those blocks of a sequence's text that are not kept yet; not so for one that waits, which has none."""
        if self.paused or sequence.slot < 0:
            return
        # A verification may have run past the token that ended the text.
        known = sequence.tokens[: sequence.num_computed]
        keys = self._keys(sequence, known)
        first, end = self._drafted(sequence)
        starts = (number * BLOCK_TOKENS for number in range(len(keys)))
        written = self.index.insert(keys, [first <= start <= end - BLOCK_TOKENS for start in starts])
        if written:
            places, numbers = zip(*written, strict=True)
            self._blocks.store(sequence.slot, places, numbers)

    def read(self, keys: Many[bytes], first: int = 0) -> Contents:
        """What the blocks of the leading ``keys`` hold, from the one numbered ``first`` on."""
        blocks = self.index.match(keys)[first:]
        return Contents(tuple(self._blocks.read([block.number for block in blocks])), tuple(block.drafted for block in blocks))

    def add(self, keys: Many[bytes], contents: Contents) -> None:
        """Keep what ``read`` gave elsewhere of a text's blocks: of the last ``keys``, those before which must be kept already."""
        first = len(keys) - len(contents.drafted)
        if len(self.index.match(keys[:first])) < first:
            return  # they have just given way to others
        written = self.index.insert(keys, [*[False] * first, *contents.drafted])
        if written:
            places, numbers = zip(*written, strict=True)
            self._blocks.write(numbers, contents.rows, [place - first for place in places])

    def _drafted(self, sequence: Sequence) -> tuple[int, int]:
        """From where and up to where rows are complete."""
        if not self._drafter_keeps_rows:
            return 0, sequence.num_computed
        first = window_start(sequence, self._window) if sequence.speculative else sequence.num_computed
        return first, sequence.num_computed - sequence.num_untold

    def _keys(self, sequence: Sequence, tokens: Many[int]) -> list[bytes]:
        extend_keys(sequence.block_keys, tokens, sequence.request.cache_salt)
        return sequence.block_keys[: len(tokens) // BLOCK_TOKENS]
