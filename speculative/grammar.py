"""Grammars that texts must follow, by xgrammar: which tokens may come next, and what must."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any

import torch
import xgrammar
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from speculative.errors import InvalidRequestError
from speculative.json_grammar import grammar as json_grammar
from speculative.json_grammar import reason
from speculative.json_schema import LONGEST_PATTERN, costly, unsupported
from speculative.request import Grammar

LONGEST = {"json_schema": 2**16, "regex": LONGEST_PATTERN, "ebnf": 2**13, "structural_tag": 2**18}
"""Characters of a grammar: repetitions side by side take a time to compile that grows with the square of their number."""

CACHE_BYTES = 64 * 2**20
"""Compiled grammars that are kept for the next request, by xgrammar's count."""

MOST_KEPT = 256
"""Grammars that are kept, whatever they count: parts that many have in common are counted once, and so what the thousandth adds to
the process is several times what it adds to the count."""

_LONG_TOKEN = 32
"""Characters that few tokens have more of: as much text is looked at as so many tokens may have."""

_ERRORS = (RuntimeError, ValueError, xgrammar.InvalidJSONError, xgrammar.InvalidStructuralTagError)


class Grammars:
    """Compiles grammars for one model's tokens; up to ``MOST_KEPT`` are kept, then none, and so on. Safe in several threads.

    ``end_token_ids`` end a text, and may do so where its grammar is complete.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self._vocab_size, self._ends = vocab_size, list(end_token_ids)
        # Its own: tokenizers are not made for several threads.
        self._text = Tokenizer.from_str(tokenizer._tokenizer.to_str()) if hasattr(tokenizer, "_tokenizer") else None
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=self._ends)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)
        self._kept: set[int] = set()

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """Raises InvalidRequestError for what is no grammar, or none that can be followed."""
        if not self._ends:
            raise InvalidRequestError("this model has no end token, so no grammar could end its text", param="grammar")
        _check_length(grammar)
        self._make_room(grammar)
        try:
            match grammar.kind:
                case "json_schema":
                    if (problem := _schema_problem(grammar.source)) is not None:
                        raise InvalidRequestError(problem, param="grammar")
                    return self._compiler.compile_grammar(_json_schema(grammar.source))
                case "regex":
                    return self._compiler.compile_regex(grammar.source)
                case "ebnf":
                    return self._compiler.compile_grammar(grammar.source)
                case "structural_tag":
                    return self._compiler.compile_structural_tag(_structural_tag(grammar.source))
        except _ERRORS as error:
            raise InvalidRequestError(reason(error), param="grammar") from None

    def _make_room(self, grammar: Grammar) -> None:
        name = hash(grammar)  # their sources may be long
        if name not in self._kept and len(self._kept) >= MOST_KEPT:
            self._kept.clear()
            self._compiler.clear_cache()
        self._kept.add(name)

    def follow(self, grammar: Grammar) -> GrammarMatcher:
        """The beginning of a text that follows ``grammar``; raises as ``compile``."""
        return GrammarMatcher(self.compile(grammar), self._vocab_size, self._text)


def _check_length(grammar: Grammar) -> None:
    if len(grammar.source) > LONGEST[grammar.kind]:
        message = f"it has {len(grammar.source)} characters, and at most {LONGEST[grammar.kind]} are compiled"
        raise InvalidRequestError(message, param="grammar")


# A grammar is checked in one thread and followed in another, the engine's, which is not to do it all again.
@lru_cache(maxsize=256)
def _schema_problem(source: str) -> str | None:
    """Why no text could be held to this schema; None if texts can."""
    try:
        return unsupported(json.loads(source))
    except ValueError as error:
        return f"the schema is not JSON: {error}"


@lru_cache(maxsize=256)
def _json_schema(source: str) -> str:
    """The grammar of a schema, with one way to write a value: what has no choice need not be asked of the model."""
    return json_grammar(json.loads(source))


@lru_cache(maxsize=256)
def _structural_tag(source: str) -> str:
    """A structural tag whose JSON has one way to write a value too; xgrammar's own lets white space vary.

    Schemas are followed as far as they can be, so nothing is said of what is not; but what is in it is no longer than by itself.
    """
    tag = json.loads(source)
    if (problem := costly(tag)) is not None:
        raise InvalidRequestError(problem, param="grammar")
    return json.dumps(_one_way(tag))


def _one_way(node: Any) -> Any:
    if isinstance(node, list):
        return [_one_way(each) for each in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "grammar" and isinstance(written := node.get("grammar"), str):
        _check_length(Grammar("ebnf", written))
    if node.get("type") != "json_schema" or "json_schema" not in node:
        return {key: _one_way(value) for key, value in node.items()}
    return {"type": "grammar", "grammar": json_grammar(node["json_schema"])}


class GrammarMatcher:
    """Where one text stands in its grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocab_size: int, text: Tokenizer | None) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bitmask = xgrammar.allocate_token_bitmask(1, vocab_size)
        self._vocab_size = vocab_size
        self._text = text
        self._stuck = False

    @property
    def ended(self) -> bool:
        """True once the text has its end token."""
        return self._stuck or self._matcher.is_terminated()

    def accept(self, token: int) -> bool:
        """The text goes on with ``token``; False where that is not allowed, and the text has ended then."""
        accepted: bool = self._matcher.accept_token(token)
        self._stuck = self._stuck or not accepted
        return accepted

    def allows(self, token: int) -> bool:
        """Whether ``token`` may come next."""
        self._matcher.fill_next_token_bitmask(self._bitmask)
        return bool(int(self._bitmask[0, token // 32]) >> (token % 32) & 1)

    def mask(self, scores: Tensor) -> Tensor:
        """Scores [V] with −inf for the tokens that may not come next."""
        return scores.masked_fill(~self._allowed().to(scores.device), float("-inf"))

    def _allowed(self) -> Tensor:
        """Which tokens may come next [V]; the end where the grammar wants a text that these tokens cannot write."""
        self._matcher.fill_next_token_bitmask(self._bitmask)
        bits = torch.arange(32, dtype=torch.int32)
        allowed = (self._bitmask[0].unsqueeze(1) >> bits & 1).bool().flatten()[: self._vocab_size]
        if not allowed.any():
            allowed[self._matcher.stop_token_ids] = True
        return allowed

    def following(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """The rows of a draft tree, as in ``DraftTree`` and ascending, that lie on texts which the grammar allows."""
        children: dict[int, list[int]] = {}
        for row, parent in enumerate(parents, 1):
            children.setdefault(parent, []).append(row)
        kept: list[int] = []

        def walk(parent: int) -> None:
            for row in children.get(parent, ()):
                if not self._matcher.is_terminated() and self._matcher.accept_token(tokens[row - 1]):
                    kept.append(row)
                    walk(row)
                    self._matcher.rollback(1)

        walk(0)
        return sorted(kept)

    def forced(self, most: int) -> list[int]:
        """Tokens for the text that must come next, and for its end if nothing can follow; [] where there is a choice.

        At most ``most``, and of a longer text no more is looked at than they may have.
        """
        if self._text is None:
            return []
        try:
            text = self._matcher.find_jump_forward_string()
        except UnicodeDecodeError:  # it begins or ends within a character, and xgrammar tells it as text or not at all
            text = ""
        if not text:
            return []
        ids: list[int] = self._text.encode(text[: most * _LONG_TOKEN], add_special_tokens=False).ids[:most]
        # Some tokenizers begin every text with a space, which the grammar may not allow.
        accepted = sum(1 for _ in takewhile(self._matcher.accept_token, ids))
        forced = ids[:accepted]
        if accepted < most and self._matcher.is_completed() and int(self._allowed().sum()) == len(self._matcher.stop_token_ids):
            forced.append(self._matcher.stop_token_ids[0])
        self._matcher.rollback(accepted)
        return forced
