"""The target's pass over a step's trees by one operator; see ``models/tree_pass.cpp``."""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import chain
from typing import Any

from torch import Tensor

from models.kv_cache import KVCache
from models.plans import span_of
from models.tiles import in_rows, operator_class
from speculative.batch import in_scratch_rows
from speculative.sequence import Sequence
from speculative.tree import DraftTree


class TiledVerification:
    """A TreePass of the operators that find the layout, run the layers and the head; tapped are the final hidden states, if any."""

    def __init__(self, layout: Any, layers: Any, head: Any, cache: KVCache, *, taps: bool) -> None:
        operator = operator_class("TreePass", cache.data.dtype)(layout, layers, head)
        self._run, self._cache, self._taps = operator.run, cache, taps

    def suits(self, batch: Many[Sequence], tree: DraftTree) -> bool:
        """As in TreePass."""
        return in_scratch_rows(self._cache, batch, tree)

    def __call__(
        self, roots: list[int], tree: DraftTree, lengths: list[int], first_slot: int
    ) -> tuple[Tensor, list[list[int]], Tensor | None]:
        """As in TreePass."""
        cache, batch, rows = self._cache, len(roots), tree.num_rows
        ids = [token for root, nodes in zip(roots, tree.token_lists, strict=True) for token in (root, *nodes)]
        parents = list(chain.from_iterable(tree.parent_lists))
        columns = span_of(cache, max(lengths) + (rows == 1))
        logits, hidden, best = self._run(ids, parents, lengths, columns, cache.window(first_slot, batch))
        return logits, in_rows(best, batch), hidden if self._taps else None
