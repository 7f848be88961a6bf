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
from speculative.drafters.merging import Chain, merged
from speculative.drafters.ngram import NgramIndex
from speculative.drafters.wrapper import DrafterWrapper
from speculative.policy import DraftShape
from speculative.sequence import Sequence
from speculative.tree import DraftTree, children

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


@dataclass(slots=True)
class _Worth:
    """How many ``tokens`` matches are expected to foretell, and how likely they get the ``first`` one right."""

    tokens: float
    first: float

    def learn(self, right: int) -> None:
        """One has foretold so many."""
        self.tokens += _WEIGHT * (right - self.tokens)
        self.first += _WEIGHT * ((right > 0) - self.first)

    def probabilities(self, length: int) -> list[float]:
        """How likely each of so many tokens is reached, all but the first being equally likely to follow the one before."""
        following = 1 - self.first / max(self.tokens, self.first, 1e-9)
        return [self.first * following**further for further in range(length)]


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the other drafter proposed last, for whom, and how long their texts were."""

    tree: DraftTree
    sequences: list[Sequence]
    lengths: list[int]

    def foretold(self) -> Iterator[int]:
        """How many tokens each tree got right, of those whose end the texts have reached."""
        trees = zip(self.tree.token_lists, self.tree.parent_lists, self.tree.sizes, strict=True)
        for sequence, length, (tokens, parents, size) in zip(self.sequences, self.lengths, trees, strict=True):
            if size == 0:
                continue
            known = children(tokens[:size], parents[:size])
            row = 0
            for right, token in enumerate(islice(sequence.tokens, length, None)):
                if (row := known.get((row, token), -1)) < 0:
                    yield right
                    break


@dataclass(slots=True)
class _Text:
    """One request's: its index, and the match whose worth is still to be seen."""

    index: NgramIndex
    pending: _Match | None = None


class LookupDrafter(DrafterWrapper):
    """Looks up first, and asks ``other`` for trees only when some sequence of the batch has no match that is as good as one.

    Once there are trees, what matches foretell is merged with them.

    A match has ``order`` tokens or more. How many tokens it is expected to foretell is learned from those before it that were as
    long, of all requests and whether they were used or not; what trees foretell, from the trees.
    """

    def __init__(self, other: Drafter, order: int) -> None:
        super().__init__(other)
        self._orders = (_LONG, order) if order < _LONG else (order,)
        self._texts: dict[str, _Text] = {}
        self._worths: dict[int, _Worth] = {}
        self.expected_of_trees = _HOPED_OF_TREES
        self._asked: _Asked | None = None

    def forget(self, sequence: Sequence) -> None:
        """Drop its index."""
        self._texts.pop(sequence.request.request_id, None)
        super().forget(sequence)

    def propose(self, sequences: list[Sequence], shape: DraftShape, target_cache: KVCache | None) -> DraftTree:
        """Chains alone, where all of them are as good as trees; else the other's trees, with chains merged in."""
        if self._asked is not None:
            for right in self._asked.foretold():
                self.expected_of_trees += _WEIGHT * (right - self.expected_of_trees)
            self._asked = None
        matches = [self._match(sequence, shape.nodes) if sequence.drafts_here else None for sequence in sequences]
        chains = [None if match is None else self._chain(match) for match in matches]
        enough = [match is not None and self._suffices(match) for match in matches]
        if all(each or not sequence.drafts_here for each, sequence in zip(enough, sequences, strict=True)):
            tokens = [[] if chain is None else chain.tokens for chain in chains]
            return DraftTree.from_chains(tokens, [() if chain is None else chain.probabilities for chain in chains])
        tree = self.other.propose(sequences, shape, target_cache)
        self._asked = _Asked(tree, list(sequences), [len(sequence.tokens) for sequence in sequences])
        if not any(matches):
            return tree
        if tree.probability_lists is None:
            return tree.with_chains([chain.tokens if chain and each else [] for chain, each in zip(chains, enough, strict=True)])
        return merged(tree, chains, shape.nodes)

    def _suffices(self, match: _Match) -> bool:
        """Whether a match is as good as a tree by itself; merged, the two are somewhat better, and cost more."""
        return self._of(match).tokens >= max(LEAST, self.expected_of_trees)

    def _chain(self, match: _Match) -> Chain:
        return Chain(match.chain, self._of(match).probabilities(len(match.chain)))

    def _of(self, match: _Match) -> _Worth:
        """Of matches as long as this one."""
        worth = self._worths.get(match.length)
        if worth is None:
            worth = self._worths[match.length] = _Worth(hoped := _HOPED * match.length, hoped / (1 + hoped))
        return worth

    def _match(self, sequence: Sequence, most: int) -> _Match | None:
        """Where the text went on as it does now, and what the match before this one teaches; None where nothing matches."""
        text, tokens = self._texts.get(sequence.request.request_id), sequence.tokens
        if text is None:
            text = self._texts[sequence.request.request_id] = _Text(NgramIndex(self._orders))
        if text.pending is not None and (right := text.pending.foretold(tokens)) is not None:
            self._of(text.pending).learn(right)
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
