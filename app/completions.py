"""Prompts of /v1/completions -> token ids; generated text -> text completions and their chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.errors import InvalidParameterError
from app.generation import Choice
from app.responses import Completion, CompletionChoice, FinishReason, ResponseMetrics, Usage

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def prompt_tokens(tokenizer: Any, vocab_size: int, prompts: Sequence[str | list[int]]) -> list[list[int]]:
    """Each prompt as token ids; texts get the special tokens that the tokenizer adds, ids are taken as they are."""
    tokenized = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = _encode(tokenizer, prompt)
        else:
            ids = prompt
            if (wrong := next((token for token in ids if not 0 <= token < vocab_size), None)) is not None:
                raise InvalidParameterError(
                    f"Token id {wrong} is outside the vocabulary; ids go from 0 to {vocab_size - 1}.", param="prompt"
                )
        if not ids:
            raise InvalidParameterError("The prompt is empty.", param="prompt")
        tokenized.append(ids)
    return tokenized


def _encode(tokenizer: Any, text: str) -> list[int]:
    try:
        ids: list[int] = tokenizer.encode(text, verbose=False)
    except Exception as error:  # JSON can carry half a surrogate pair, which is not text
        raise InvalidParameterError(f"The prompt cannot be tokenized: {error}", param="prompt") from error
    return ids


class CompletionWriter:
    """Words answers as text completions and their chunks."""

    def __init__(self, response_id: str, created: int, model: str, include_usage: bool) -> None:
        self._id = response_id
        self._created = created
        self._model = model
        self._extra: dict[str, Any] = {"usage": None} if include_usage else {}

    def whole(self, choices: Sequence[Choice], usage: Usage, metrics: ResponseMetrics) -> Completion:
        """The answer to a request that does not stream."""
        texts = [_choice(index, choice.text, choice.finish_reason) for index, choice in enumerate(choices)]
        return self._completion(texts, {"usage": usage, "metrics": metrics})

    def begin(self, index: int) -> None:
        """Text completions begin with text."""

    def text(self, index: int, text: str) -> Completion:
        """More of the text."""
        return self._completion([_choice(index, text)], self._extra)

    def finish(self, index: int, reason: FinishReason, metrics: ResponseMetrics | None) -> Completion:
        """The text's end."""
        extra = self._extra if metrics is None else self._extra | {"metrics": metrics}
        return self._completion([_choice(index, "", reason)], extra)

    def summary(self, usage: Usage, metrics: ResponseMetrics) -> Completion:
        """Usage of the whole response."""
        return self._completion([], {"usage": usage, "metrics": metrics})

    def _completion(self, choices: list[CompletionChoice], extra: dict[str, Any]) -> Completion:
        return Completion(id=self._id, object="text_completion", created=self._created, model=self._model, choices=choices, **extra)


def _choice(index: int, text: str, reason: FinishReason | None = None) -> CompletionChoice:
    return CompletionChoice(index=index, text=text, logprobs=None, finish_reason=reason)
