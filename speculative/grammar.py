"""Grammars that texts must follow, by llguidance: which tokens may come next, and what must."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from llguidance import LLMatcher, LLParserLimits
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from speculative.errors import InvalidRequestError
from speculative.grammar_sources import reason, source_of
from speculative.grammar_tokens import spelled_tokens
from speculative.request import Grammar

MOST_KEPT = 64
"""Grammars that are kept for the next request."""

KEPT_BYTES = MOST_KEPT * 2**20
"""What these take at most, but for grammars far larger than people write: some 0.3 MB each."""

_LIMITS = LLParserLimits(max_items_in_row=20_000)
"""Objects with some thousand properties that may all be left out; llguidance's own 2,000 end a text with 520 of them."""


class Grammars:
    """Compiles grammars for one model's tokens. Safe in several threads.

    ``end_token_ids`` end a text, and may do so where its grammar is complete. Raises ValueError where a tokenizer does not tell its
    tokens' bytes, or has more of them than the model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        if not hasattr(tokenizer, "_tokenizer"):
            raise ValueError("it is none of the tokenizers library")
        self._ends = list(end_token_ids)
        self._tokenizer = spelled_tokens(tokenizer._tokenizer, vocab_size, self._ends)
        # A grammar is checked in one thread and followed in another, the engine's, which is not to do it all again.
        self._compiled = lru_cache(maxsize=MOST_KEPT)(self._compile)

    def compile(self, grammar: Grammar) -> None:
        """Raises InvalidRequestError for what is no grammar, or none that can be followed."""
        self._compiled(grammar)

    def follow(self, grammar: Grammar) -> GrammarMatcher:
        """The beginning of a text that follows ``grammar``; raises as ``compile``."""
        return GrammarMatcher(self._compiled(grammar).deep_copy(), self._ends)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            source = source_of(grammar)
        except ValueError as error:
            raise InvalidRequestError(str(error), param="grammar") from None
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS)
        begun = matcher.deep_copy()
        if not begun.is_error():
            begun.compute_logit_bias()  # some have no beginning
        if begun.is_error():
            raise InvalidRequestError(reason(grammar, begun.get_error()), param="grammar")
        return matcher


class GrammarMatcher:
    """Where one text stands in its grammar."""

    def __init__(self, matcher: LLMatcher, end_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._ends = end_token_ids
        self._ended = False

    @property
    def ended(self) -> bool:
        """True once the text has its end token."""
        return self._ended

    def accept(self, token: int) -> bool:
        """The text goes on with ``token``; False where that is not allowed, and the text has ended then."""
        is_end = token in self._ends
        accepted: bool = self.allows(token) if is_end else self._matcher.consume_token(token)
        self._ended = is_end or not accepted
        return accepted

    def allows(self, token: int) -> bool:
        """Whether ``token`` may come next."""
        return self._num_allowed([token]) == 1

    def _num_allowed(self, tokens: list[int]) -> int:
        """How many of these tokens may come next, one after the other."""
        if self._matcher.is_stopped():  # it says no to all then, to the end too
            return int(tokens[0] in self._ends)
        allowed: int = self._matcher.validate_tokens(tokens)
        return allowed

    def mask(self, scores: Tensor) -> Tensor:
        """Scores [V] with −inf for the tokens that may not come next: all but the end where these tokens cannot write what must."""
        return scores.masked_fill(~self._allowed().to(scores.device), float("-inf"))

    def _allowed(self) -> Tensor:
        return torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) != 0

    def following(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """The rows of a draft tree, as in ``DraftTree`` and ascending, that lie on texts which the grammar allows."""
        kept: set[int] = set()
        for leaf in set(range(1, len(tokens) + 1)).difference(parents):
            path, row = [], leaf
            while row:
                path.append(row)
                row = parents[row - 1]
            path.reverse()
            kept.update(path[: self._num_allowed([tokens[row - 1] for row in path])])
        return sorted(kept)

    def forced(self, most: int) -> list[int]:
        """Tokens for the text that must come next, and for its end if nothing can follow; [] where there is a choice."""
        forced: list[int] = self._matcher.compute_ff_tokens()[:most]
        if not forced:
            return []
        ahead = self._matcher.deep_copy()
        forced = forced[: ahead.try_consume_tokens(forced)]  # a special token may have the name of a text
        if len(forced) < most and GrammarMatcher(ahead, self._ends)._must_end():
            forced.append(self._ends[0])
        return forced

    def _must_end(self) -> bool:
        return self._matcher.is_accepting() and int(self._allowed().sum()) == len(self._ends)
