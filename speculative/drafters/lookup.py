"""Drafts from the text itself where it repeats, and from another drafter where it does not.

Answers quote: names and dates of the question, a tool's arguments, lines of code. Where the last tokens stand earlier in the text,
what followed them there is as good a draft as a network's and costs nothing (prompt lookup, as in transformers and vLLM).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from models.kv_cache import KVCache
from speculative.common_prefix import common_prefix
from speculative.drafters.base import Drafter
from speculative.drafters.ngram import NgramIndex
from speculative.drafters.wrapper import DrafterWrapper
from speculative.policy import DraftShape
from speculative.sequence import Sequence
from speculative.tree import DraftTree

WITHOUT_DRAFTING = 0.8
"""What a step that drafts from the text costs, where one for which a network drafts costs 1 (docs/results/bundled-pair.md)."""

LEAST = 0.5
"""Tokens that a match must be expected to foretell in any case: of a network's drafts a policy knows what they are worth."""

_LONG = 12
"""Where so many tokens stand earlier, that place is better than the newest one at which fewer do."""

_HOPED = 0.25
"""What a match is expected to foretell for each of its tokens, as long as nothing is known."""

_HOPED_OF_TREES = 1.8
_WEIGHT = 0.05
_LONGEST = 16


@dataclass(slots=True)
class _Match:
    """What followed the text's last ``length`` tokens earlier, and where the text stood when it was found."""

    start: int
    length: int
    chain: list[int]

    def foretold(self, tokens: list[int]) -> int | None:
        """How many tokens it got right; None while that cannot be said."""
        came = tokens[self.start : self.start + len(self.chain)]
        right = common_prefix(self.chain, came)
        return None if right == len(came) < len(self.chain) else right


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the other drafter proposed last, for whom, and how long their texts were."""

    tree: DraftTree
    sequences: list[Sequence]
    lengths: list[int]

    def foretold(self) -> Iterator[int]:
        """How many tokens each tree got right, of those whose end the texts have reached."""
        trees = zip(self.tree.tokens.tolist(), self.tree.parents.tolist(), self.tree.sizes, strict=True)
        for sequence, length, (tokens, parents, size) in zip(self.sequences, self.lengths, trees, strict=True):
            if size == 0:
                continue
            children = {(parents[node], tokens[node]): node + 1 for node in range(size)}
            row = 0
            for right, token in enumerate(islice(sequence.tokens, length, None)):
                if (row := children.get((row, token), -1)) < 0:
                    yield right
                    break


@dataclass(slots=True)
class _Text:
    """One request's: its index, and the match whose worth is still to be seen."""

    index: NgramIndex
    pending: _Match | None = None


class LookupDrafter(DrafterWrapper):
    """Looks up first, and asks ``other`` for a tree only when some sequence of the batch has no match that is as good as one.

    A match has ``order`` tokens or more. How many tokens it is expected to foretell is learned from those before it that were as
    long, of all requests and whether they were used or not; what trees foretell, from the trees.
    """

    def __init__(self, other: Drafter, order: int) -> None:
        super().__init__(other)
        self._orders = (_LONG, order) if order < _LONG else (order,)
        self._texts: dict[str, _Text] = {}
        self._of_matches: dict[int, float] = {}
        self.expected_of_trees = _HOPED_OF_TREES
        self._asked: _Asked | None = None

    def forget(self, sequence: Sequence) -> None:
        """Drop its index."""
        self._texts.pop(sequence.request.request_id, None)
        super().forget(sequence)

    def propose(self, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache | None) -> DraftTree:
        """A chain for each sequence with a match, the other's tree for the rest."""
        if self._asked is not None:
            for right in self._asked.foretold():
                self.expected_of_trees += _WEIGHT * (right - self.expected_of_trees)
            self._asked = None
        matches = [self._match(sequence, shape.nodes) if sequence.drafts_here else None for sequence in sequences]
        chains = [self._chain(match, WITHOUT_DRAFTING) for match in matches]
        if all(chain or not sequence.drafts_here for chain, sequence in zip(chains, sequences, strict=True)):
            return DraftTree.from_chains(chains).expecting(self._right(matches, chains))
        tree = self.other.propose(sequences, shape, target_cache)
        self._asked = _Asked(tree, list(sequences), [len(sequence.tokens) for sequence in sequences])
        # Drafting is paid for by now.
        chains = [self._chain(match, 1.0) for match in matches]
        if not any(chains):
            return tree
        mixed = tree.with_chains(chains)
        return mixed if tree.probabilities is None else mixed.expecting(self._right(matches, chains))

    def _right(self, matches: list[_Match | None], chains: list[list[int]]) -> list[float | None]:
        """How many tokens of each chain are expected to be right."""
        pairs = zip(matches, chains, strict=True)
        return [self._expected(match) if match is not None and chain else None for match, chain in pairs]

    def _expected(self, match: _Match) -> float:
        """How many tokens a match as long as this one is expected to foretell."""
        return self._of_matches.get(match.length, _HOPED * match.length)

    def _chain(self, match: _Match | None, cost: float) -> list[int]:
        """What the text's own example says that comes next, where a token of it costs no more than one of a tree; else []."""
        if match is None:
            return []
        return match.chain if self._expected(match) >= max(LEAST, cost * (1 + self.expected_of_trees) - 1) else []

    def _match(self, sequence: Sequence, most: int) -> _Match | None:
        """Where the text went on as it does now, and what the match before this one teaches; None where nothing matches."""
        text, tokens = self._texts.get(sequence.request.request_id), sequence.tokens
        if text is None:
            text = self._texts[sequence.request.request_id] = _Text(NgramIndex(self._orders))
        if text.pending is not None and (right := text.pending.foretold(tokens)) is not None:
            expected = self._expected(text.pending)
            self._of_matches[text.pending.length] = expected + _WEIGHT * (right - expected)
            text.pending = None
        found = text.index.find(tokens)
        if found is None:
            return None
        match = _Match(len(tokens), _matching(tokens, found), tokens[found : found + most])
        text.pending = text.pending or match
        return match


def _matching(tokens: list[int], end: int) -> int:
    """How many of the last tokens stand before ``end`` too, up to the most that matters."""
    length = 0
    while length < min(end, _LONGEST) and tokens[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length
