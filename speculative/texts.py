"""Sequences of requests, before their first step."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from speculative.detokenizer import Detokenizer
from speculative.errors import InvalidRequestError
from speculative.grammar import Grammars
from speculative.prediction import Prediction
from speculative.request import Grammar, Request
from speculative.sampler import Sampler
from speculative.sequence import Sequence


class Texts:
    """Begins texts of one model: tokens alone without a tokenizer, following no grammar without a token that ends them either."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self._text = tokenizer._tokenizer if tokenizer is not None and hasattr(tokenizer, "_tokenizer") else None
        added = self._text.get_added_tokens_decoder() if self._text is not None else {}
        self._special = frozenset(token for token, each in added.items() if each.special)
        self._grammars: Grammars | None = None
        self._lacks = "has no tokenizer"
        if tokenizer is not None and self._eos_token_ids:
            try:
                self._grammars = Grammars(tokenizer, vocab_size, sorted(self._eos_token_ids))
            except ValueError as error:
                self._lacks = f"has a tokenizer of which llguidance knows too little ({error})"
        elif tokenizer is not None:
            self._lacks = "names no token that ends a text (eos_token_id in generation_config.json)"

    def begin(self, request: Request, max_model_len: int) -> Sequence:
        """The prompt and what is made of its parameters, without a slot; a request without a seed gets one."""
        params, prompt = request.params, request.prompt_token_ids
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        grammar = self._grammars.follow(params.grammar) if self._grammars is not None and params.grammar is not None else None
        return Sequence(
            request=request,
            sampler=Sampler(params, seed, prompt, self._eos_token_ids, grammar),
            max_length=max_model_len if params.max_tokens is None else len(prompt) + params.max_tokens,
            detokenizer=Detokenizer(self._text, params.stop, params.min_tokens, self._special, prompt if request.continues else ()),
            tokens=list(prompt),
            prediction=Prediction(request.prediction) if request.prediction else None,
        )

    def resume(self, request: Request, max_model_len: int) -> Sequence:
        """The same with the output that the request brings; raises InvalidRequestError where that cannot be."""
        sequence = self.begin(request, max_model_len)
        sequence.take_output(self._eos_token_ids)
        return sequence

    def check_grammar(self, grammar: Grammar) -> None:
        """Raise InvalidRequestError for a grammar that cannot be followed; takes seconds for large ones. Any thread may ask."""
        if self._grammars is None:
            raise InvalidRequestError(f"this model {self._lacks}, so no grammar can be followed", param="grammar")
        self._grammars.compile(grammar)
