"""Grammars that texts must follow, by llguidance: which tokens may come next, and what must."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock

import torch
from llguidance import LLMatcher, LLParserLimits
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from speculative.errors import InvalidRequestError
from speculative.grammar_sources import reason, source_of
from speculative.grammar_tokens import spelled_tokens
from speculative.request import Grammar

logger = logging.getLogger("moaserve.engine")

MOST_KEPT = 64
"""Grammars that are kept for the next request."""

KEPT_BYTES = MOST_KEPT * 2**20
"""What these take at most, but for grammars far larger than people write: some 0.3 MB each."""

_OF_SCHEMAS = LLParserLimits(max_items_in_row=20_000)
"""Objects with some thousand properties that may all be left out; llguidance's own 2,000 end a text with 520 of them.

Other grammars can have such rows for each character of each token that is tried, and all texts would wait for that.
"""


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
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = Lock()

    def compile(self, grammar: Grammar) -> None:
        """Raises InvalidRequestError for what is no grammar, or none that can be followed."""
        self._compiled(grammar)

    def follow(self, grammar: Grammar) -> GrammarMatcher:
        """The beginning of a text that follows ``grammar``; raises as ``compile``."""
        compiled = self._compiled(grammar)
        return GrammarMatcher(compiled.deep_copy(), self._ends, lambda message: self._drop(grammar, compiled, message))

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        with self._lock:
            if (kept := self._kept.get(grammar)) is not None:
                self._kept.move_to_end(grammar)
                return kept
        compiled = self._compile(grammar)  # takes seconds, in which others are not to wait
        with self._lock:
            self._kept[grammar] = compiled
            self._kept.move_to_end(grammar)
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return compiled

    def _drop(self, grammar: Grammar, compiled: LLMatcher, message: str) -> None:
        """Compile a grammar anew for its next text: copies share their lexer's states, and with them a limit once it is hit."""
        logger.warning("a text's grammar can be followed no further: %s", reason(grammar, message))
        with self._lock:
            if self._kept.get(grammar) is compiled:
                del self._kept[grammar]

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            source = source_of(grammar)
        except ValueError as error:
            raise InvalidRequestError(str(error), param="grammar") from None
        limits = _OF_SCHEMAS if grammar.kind in ("json_schema", "llguidance") else None  # the latter hold schemas of tools
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        begun = matcher.deep_copy()
        if not begun.is_error():
            begun.compute_logit_bias()  # some have no beginning
        if begun.is_error():
            raise InvalidRequestError(reason(grammar, begun.get_error()), param="grammar")
        return matcher


class GrammarMatcher:
    """Where one text stands in its grammar.

    ``on_failure`` is called once with llguidance's message where it can tell no more of the text, as that hits a limit of its own.
    """

    def __init__(self, matcher: LLMatcher, end_token_ids: Sequence[int], on_failure: Callable[[str], None]) -> None:
        self._matcher = matcher
        self._ends = end_token_ids
        self._on_failure = on_failure
        self._ended = self._failed = False

    @property
    def ended(self) -> bool:
        """True once the text has its end token."""
        return self._ended

    @property
    def failed(self) -> bool:
        """True once a limit was hit: nothing but the end is allowed then, though the text may be of any form."""
        return self._failed

    def accept(self, token: int) -> bool:
        """The text goes on with ``token``; False where that is not allowed, and the text has ended then."""
        if self._ended:
            return False
        is_end = token in self._ends
        # Unlike consume_token this makes no error of a token that is not allowed: what is one is a limit.
        accepted: bool = self.allows(token) if is_end else self._matcher.try_consume_tokens([token]) == 1
        self._notice_failure()
        self._ended = is_end or not accepted
        return accepted

    def allows(self, token: int) -> bool:
        """Whether ``token`` may come next."""
        allowed = self._num_allowed(self._matcher, [token]) == 1
        self._notice_failure()
        return allowed

    def _num_allowed(self, matcher: LLMatcher, tokens: list[int]) -> int:
        """How many of these tokens may come next, one after the other."""
        if matcher.is_stopped():  # it says no to all then, to the end too
            return int(tokens[0] in self._ends)
        allowed: int = matcher.validate_tokens(tokens)
        return allowed

    def mask(self, scores: Tensor) -> Tensor:
        """Scores [V] with −inf for the tokens that may not come next: all but the end where these tokens cannot write what must."""
        allowed = _allowed(self._matcher)
        self._notice_failure()
        return scores.masked_fill(~allowed.to(scores.device), float("-inf"))

    def _notice_failure(self) -> None:
        if self._failed or not self._matcher.is_error():
            return
        message = self._matcher.get_error()
        if not message.startswith("NoExtension"):  # no token can write what must follow, which is no limit
            self._failed = True
            self._on_failure(message)

    def following(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """The rows of a draft tree, as in ``DraftTree`` and ascending, that lie on texts which the grammar allows."""
        kept: set[int] = set()
        ahead = self._matcher.deep_copy()  # drafts may hit a limit that the text never meets
        for leaf in set(range(1, len(tokens) + 1)).difference(parents):
            path, row = [], leaf
            while row:
                path.append(row)
                row = parents[row - 1]
            path.reverse()
            kept.update(path[: self._num_allowed(ahead, [tokens[row - 1] for row in path])])
        return sorted(kept)

    def forced(self, most: int) -> list[int]:
        """Tokens for the text that must come next, and for its end if nothing can follow; [] where there is a choice."""
        ahead = self._matcher.deep_copy()
        forced: list[int] = ahead.compute_ff_tokens()[:most]
        if not forced:
            return []
        forced = forced[: ahead.try_consume_tokens(forced)]  # a special token may have the name of a text
        if len(forced) < most and ahead.is_accepting() and int(_allowed(ahead).sum()) == len(self._ends):
            forced.append(self._ends[0])
        return forced


def _allowed(matcher: LLMatcher) -> Tensor:
    """Whether each token may come next [V]."""
    return torch.frombuffer(bytearray(matcher.compute_logit_bias()), dtype=torch.uint8) != 0
