"""Grammars that texts must follow, by llguidance: which tokens may come next, and what must."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from speculative.errors import InvalidRequestError
from speculative.json_refusals import LONGEST_PATTERN
from speculative.json_schema import place_of, prepared
from speculative.request import Grammar

LONGEST = {"json_schema": 2**16, "regex": LONGEST_PATTERN, "lark": 2**13, "llguidance": 2**18}
"""Characters of a grammar: what may be left out, side by side, takes time and memory that grow with the square of its number."""

LONGEST_RULES = 2**15
"""Characters of the rules of several grammars, which are as many as there are tools."""

MOST_TOGETHER = 8
"""Regular expressions that one text is to fit: their states multiply."""

MOST_KEPT = 64
"""Grammars that are kept for the next request."""

_LIMITS = LLParserLimits(max_items_in_row=20_000)  # objects with some thousand properties that may all be left out

KEPT_BYTES = MOST_KEPT * 2**20
"""What these take at most, but for grammars far larger than people write: some 0.3 MB each."""


class Grammars:
    """Compiles grammars for one model's tokens. Safe in several threads.

    ``end_token_ids`` end a text, and may do so where its grammar is complete. Raises ValueError where a tokenizer does not tell its
    tokens' bytes, or has more of them than the model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_token_ids: Sequence[int]) -> None:
        if not hasattr(tokenizer, "_tokenizer"):
            raise ValueError("it is none of the tokenizers library")
        self._ends = list(end_token_ids)
        self._tokenizer = _known_tokenizer(tokenizer._tokenizer, vocab_size, self._ends)
        # A grammar is checked in one thread and followed in another, the engine's, which is not to do it all again.
        self._compiled = lru_cache(maxsize=MOST_KEPT)(self._compile)

    def compile(self, grammar: Grammar) -> None:
        """Raises InvalidRequestError for what is no grammar, or none that can be followed."""
        self._compiled(grammar)

    def follow(self, grammar: Grammar) -> GrammarMatcher:
        """The beginning of a text that follows ``grammar``; raises as ``compile``."""
        return GrammarMatcher(self._compiled(grammar).deep_copy(), self._ends)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if (length := len(grammar.source)) > (most := LONGEST[grammar.kind]):
            raise _refused(f"it has {length} characters, and at most {most} are compiled")
        try:
            source = _source(grammar)
        except ValueError as error:
            raise _refused(str(error)) from None
        except RecursionError:
            raise _refused("it is nested too deeply") from None
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS)
        begun = matcher.deep_copy()
        if not begun.is_error():
            begun.compute_logit_bias()  # some have no beginning
        if begun.is_error():
            said = _reason(begun.get_error())
            raise _refused(said + (place_of(json.loads(grammar.source), said) if grammar.kind == "json_schema" else ""))
        return matcher


class _Spelled:
    """A tokenizer for llguidance with what each token spells; it calls this for the tokens of a text that must come."""

    def __init__(self, text: Tokenizer, spelled: LLTokenizer, end_token_id: int) -> None:
        added = text.get_added_tokens_decoder()
        plain = {token: each.content.encode() for token, each in added.items() if not each.special}
        tokens = range(spelled.vocab_size)  # those that the tokenizer does not have are special too
        self.tokens = [plain.get(token) or spelled.decode_bytes([token]) for token in tokens]
        self.special_token_ids = [token for token in tokens if spelled.is_special_token(token) and token not in plain]
        self.eos_token_id, self.bos_token_id = end_token_id, None
        self._text = text

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._text.encode(text, add_special_tokens=False).ids
        return ids


def _known_tokenizer(text: Tokenizer, vocab_size: int, end_token_ids: list[int]) -> LLTokenizer:
    source = text.to_str()
    # It takes all added tokens in angle brackets for special ones, which no text may hold: <tool_call> too, which is none.
    if all(each.special for each in text.get_added_tokens_decoder().values()):
        return LLTokenizer(source, n_vocab=vocab_size, eos_token=end_token_ids)
    spelled = LLTokenizer(source, n_vocab=vocab_size, eos_token=end_token_ids, slices=[])
    # Its own: tokenizers are not made for several threads.
    wrapped = TokenizerWrapper(_Spelled(Tokenizer.from_str(source), spelled, end_token_ids[0]))
    return LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=end_token_ids)


def _refused(problem: str) -> InvalidRequestError:
    return InvalidRequestError(problem, param="grammar")


def _source(grammar: Grammar) -> str:
    """A grammar in llguidance's words; raises ValueError for what is none."""
    match grammar.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(json.dumps(prepared(_parsed(grammar.source))))
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "lark":
            return LLMatcher.grammar_from_lark(_lark(grammar.source))
        case "llguidance":
            return json.dumps({"grammars": _parts(_parsed(grammar.source))})


def _parts(several: Any) -> list[dict[str, Any]]:
    """Several grammars in llguidance's words: their schemas are followed as far as they can be."""
    try:
        if (length := sum(len(part.get("lark_grammar", "")) for part in several["grammars"])) > LONGEST_RULES:
            raise ValueError(f"its rules have {length} characters, and at most {LONGEST_RULES} are compiled")
        return [
            part | {"json_schema": prepared(part["json_schema"], lenient=True)}
            if "json_schema" in part
            else part | {"lark_grammar": _lark(part["lark_grammar"])}
            for part in several["grammars"]
        ]
    except (AttributeError, KeyError, TypeError):
        raise ValueError('it must be {"grammars": [{"name": …, "lark_grammar": …}, {"name": …, "json_schema": …}]}') from None


def _lark(source: str) -> str:
    if len(re.findall("&", re.sub(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/', "", source))) > MOST_TOGETHER:
        raise ValueError(f"at most {MOST_TOGETHER} terminals may hold together (&)")
    try:
        converted: str = any_to_lark(source)
    except Exception as error:  # of several kinds
        raise ValueError(f"it is neither Lark nor GBNF: {error}") from None
    return converted


def _parsed(source: str) -> Any:
    try:
        return json.loads(source)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None


def _reason(message: str) -> str:
    """What llguidance says, in one line and without the grammar around it."""
    message = message.partition("<state>")[0]
    if message.startswith("NoExtension"):
        return "no text could follow it"
    if message.startswith("panic"):
        return "it cannot be compiled"
    lines = [line.strip() for line in message.splitlines()]
    told = " ".join(line for line in lines if line.strip("^ ") and not re.match(r"\d+ \|", line))
    if keys := re.fullmatch(r"Unimplemented keys: \[(.*)\]", told):
        return keys[1].replace('"', "'") + (" are not supported" if "," in keys[1] else " is not supported")
    return re.sub(r"^at \d+\(\d+\): invalid regex .* \(in regex\): ", "", told)


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
        accepted = self.allows(token)
        self._ended = not accepted or token in self._ends
        if not self._ended:
            self._matcher.consume_token(token)
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
        forced: list[int] = self._matcher.compute_ff_tokens()
        forced = forced[: self._num_allowed(forced)] if forced else []  # a special token may have the name of a text
        if forced and len(forced) < most:
            ahead = self._matcher.deep_copy()
            if ahead.consume_tokens(forced) and GrammarMatcher(ahead, self._ends)._must_end():
                return [*forced, self._ends[0]]
        return forced[:most]

    def _must_end(self) -> bool:
        return self._matcher.is_accepting() and int(self._allowed().sum()) == len(self._ends)
