"""Which beginnings of texts are kept, and in which blocks. Bookkeeping only, no tensors.

A text is cut into blocks of equally many tokens; a block's key is a hash of its tokens and of the key before it, so that it names
the whole text up to its end. Texts that begin alike share blocks.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

BLOCK_TOKENS = 16
"""Small, so that little of a turn that goes on is computed again; large enough that finding blocks costs nothing beside it."""

KEY_BYTES = 16


def extend_keys(keys: list[bytes], tokens: Sequence[int], salt: str, size: int = BLOCK_TOKENS) -> None:
    """Append the keys of those whole blocks of ``tokens`` that ``keys`` does not have yet. Other ``salt``, other keys."""
    for start in range(len(keys) * size, len(tokens) - size + 1, size):
        before = keys[-1] if keys else sha256(salt.encode()).digest()[:KEY_BYTES]
        keys.append(sha256(before + array("q", tokens[start : start + size]).tobytes()).digest()[:KEY_BYTES])


@dataclass(slots=True)
class Block:
    """A kept block: where its rows are, the key of the block before it, and whether the drafter's rows are there too."""

    number: int
    parent: bytes | None
    drafted: bool


class PrefixCache:
    """At most ``num_blocks`` blocks; the least recently used give way."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # The least recently used first. A block is used whenever those behind it are, and just after them: so it goes after them.
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()
        self._free = list(range(num_blocks - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._blocks)

    def known(self, keys: Sequence[bytes]) -> int:
        """How many leading ``keys`` are kept. Any thread may ask; it does not count as use."""
        return next((place for place, key in enumerate(keys) if key not in self._blocks), len(keys))

    def match(self, keys: Sequence[bytes]) -> list[Block]:
        """The blocks of the leading ``keys`` that are kept; they count as used."""
        found: list[Block] = []
        for key in keys:
            if (block := self._blocks.get(key)) is None:
                break
            found.append(block)
        self._use(keys[: len(found)])
        return found

    def insert(self, keys: Sequence[bytes], drafted: Sequence[bool]) -> list[tuple[int, int]]:
        """Keep a text's blocks: which of them must be written, as (place in the text, number of the block).

        Those that do not fit beside the text's own beginning are left out.
        """
        self.match(keys)
        own = set(keys)
        written: list[tuple[int, int]] = []
        kept = 0
        for place, (key, complete) in enumerate(zip(keys, drafted, strict=True)):
            block = self._blocks.get(key)
            if block is None:
                if (number := self._take(own)) is None:
                    break
                self._blocks[key] = Block(number, keys[place - 1] if place else None, complete)
                written.append((place, number))
            elif complete and not block.drafted:
                block.drafted = True
                written.append((place, block.number))
            kept += 1
        self._use(keys[:kept])
        return written

    def _take(self, own: set[bytes]) -> int | None:
        """A block to write to, at the expense of the least recently used one that is not of the text itself."""
        if self._free:
            return self._free.pop()
        key = next(iter(self._blocks), None)
        return None if key is None or key in own else self._blocks.pop(key).number

    def _use(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def check_integrity(self) -> None:
        """Raise AssertionError when a block is in two places or none, or outlives the one before it (for tests)."""
        numbers = [block.number for block in self._blocks.values()]
        assert sorted((*numbers, *self._free)) == list(range(self.num_blocks))
        order = {key: place for place, key in enumerate(self._blocks)}
        assert all(block.parent is None or order[block.parent] > order[key] for key, block in self._blocks.items())
