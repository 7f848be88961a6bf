"""Prompts of /v1/completions -> token ids; generated text -> text completions and their chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.errors import InvalidParameterError
from app.generation import Choice
from app.origins import Origins
from app.responses import Completion, CompletionChoice, CompletionLogprobs, EdgeNote, FinishReason
from app.tokens import TokenOffsets, TokenTexts, check_length, encoded
from app.usage import ResponseMetrics, Usage
from speculative.request import RequestOutput, TokenLogprob, Written

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def prompt_tokens(tokenizer: Any, vocab_size: int, prompts: Sequence[str | list[int]], most: int) -> list[list[int]]:
    """Each prompt as token ids; texts get the special tokens that the tokenizer adds, ids are taken as they are.

    Raises InvalidParameterError, and ContextLengthError for texts that are far longer than the ``most`` tokens of a context.
    """
    tokenized = []
    for prompt in prompts:
        if isinstance(prompt, str):
            check_length(tokenizer, prompt, "prompt", most)
            ids = encoded(tokenizer, prompt, "prompt")
        else:
            ids = prompt
            known_tokens(ids, vocab_size, "prompt")
        if not ids:
            raise InvalidParameterError("The prompt is empty.", param="prompt")
        tokenized.append(ids)
    return tokenized


def known_tokens(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Refuse ids that no token has; ``param`` is where the caller gave them."""
    if (wrong := next((token for token in ids if not 0 <= token < vocab_size), None)) is not None:
        raise InvalidParameterError(f"Token id {wrong} is outside the vocabulary; ids go from 0 to {vocab_size - 1}.", param=param)


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that comes before its completion: its text, and its tokens."""

    text: str
    token_ids: Sequence[int]


def echoes(tokenizer: Any, given: Sequence[str | list[int]], prompts: Sequence[list[int]], n: int) -> list[Echo]:
    """What each choice begins with, ``n`` for each prompt: the caller's own text, or what the caller's token ids stand for."""
    texts = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in given]
    return [Echo(text, ids) for text, ids in zip(texts, prompts, strict=True) for _ in range(n)]


class CompletionWriter:
    """Words answers as text completions and their chunks.

    ``prompts`` are those of all choices. ``tokens`` are given where log-probabilities are asked for, ``echoed``, one for each
    choice, where the prompt is to come first, and ``origins`` where those of tokens are asked for.
    """

    def __init__(
        self,
        response_id: str,
        created: int,
        model: str,
        prompts: Sequence[Sequence[int]],
        tokens: TokenTexts | None,
        echoed: Sequence[Echo] | None,
        origins: Origins | None = None,
    ) -> None:
        self._id = response_id
        self._created = created
        self._model = model
        self._prompts = prompts
        self._tokens, self._echoed, self._origins = tokens, echoed, origins
        self._offsets: dict[int, TokenOffsets] = {}

    def whole(self, choices: Sequence[Choice], usage: Usage, metrics: ResponseMetrics) -> Completion:
        """The answer to a request that does not stream."""
        completion = self._completion(*(self._whole(index, choice) for index, choice in enumerate(choices)), metrics=metrics)
        completion.usage = usage
        return completion

    def begin(self, index: int, first: RequestOutput) -> Completion | None:
        """The prompt, where it is to be echoed."""
        if self._echoed is None:
            return None
        logprobs = self._prompt_logprobs(index, first.prompt_logprobs or ())
        return self._completion(CompletionChoice(index=index, text=self._echoed[index].text, logprobs=logprobs, finish_reason=None))

    def text(self, index: int, output: RequestOutput) -> Completion | str | None:
        """More of the text, by itself where that is all."""
        if not (output.text_delta or output.logprobs or output.written or (self._origins and output.new_token_ids)):
            return None
        if not (self._tokens or output.written or self._origins):
            return output.text_delta
        note = None if output.written is None else self._note(index, output.written)
        logprobs = self._logprobs(index, output.logprobs or ())
        choice = CompletionChoice(index=index, text=output.text_delta, logprobs=logprobs, finish_reason=None)
        if self._origins is not None:
            choice.token_origins = self._origins.more(index, output)
        completion = self._completion(choice)
        if note is not None:
            completion.edge = note
        return completion

    def words(self, index: int, text: str) -> Completion:
        """More of the text."""
        return self._completion(CompletionChoice(index=index, text=text, logprobs=None, finish_reason=None))

    def finish(self, index: int, reason: FinishReason, metrics: ResponseMetrics | None) -> Completion:
        """The text's end."""
        return self._completion(CompletionChoice(index=index, text="", logprobs=None, finish_reason=reason), metrics=metrics)

    def summary(self, metrics: ResponseMetrics) -> Completion:
        """No choice: what was said is of the whole response."""
        return self._completion(metrics=metrics)

    def _note(self, index: int, written: Written) -> EdgeNote:
        """What of a choice stands, an echoed prompt included, and what its next tokens' texts begin behind."""
        character, token = written.first_character, written.first_token
        if not written.offline and index in self._offsets:
            self._offsets[index].cut(token)
        if self._echoed is not None:
            character, token = character + len(self._echoed[index].text), token + len(self._echoed[index].token_ids)
        return EdgeNote.of(written, character, token)

    def _whole(self, index: int, choice: Choice) -> CompletionChoice:
        before, text = None, choice.text
        if self._echoed is not None:
            before, text = self._prompt_logprobs(index, choice.prompt_logprobs), self._echoed[index].text + text
        logprobs = _joined(before, self._logprobs(index, choice.logprobs))
        answer = CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=choice.finish_reason)
        if self._origins is not None:
            answer.token_origins = self._origins.whole(index, choice.outputs)
        return answer

    def _prompt_logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
        """Of an echoed prompt: nothing is known of its first token."""
        if self._tokens is None or self._echoed is None:
            return None
        echo = self._echoed[index]
        offsets = self._offsets_of(index).of_prompt(echo.token_ids, echo.text)
        first = self._lists([echo.token_ids[0]], [None], [None], offsets[:1])
        return _joined(first, self._told(logprobs, offsets[1:]))

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
        if self._tokens is None:
            return None
        return self._told(logprobs, self._offsets_of(index).more([each.token_id for each in logprobs]))

    def _offsets_of(self, index: int) -> TokenOffsets:
        assert self._tokens is not None
        if index not in self._offsets:
            self._offsets[index] = self._tokens.offsets(self._prompts[index])
        return self._offsets[index]

    def _told(self, logprobs: Sequence[TokenLogprob], offsets: list[int]) -> CompletionLogprobs:
        """The token itself is among the likeliest, even where it is none of them."""
        assert self._tokens is not None
        top = []
        for each in logprobs:
            likeliest = {self._tokens.text(token): value for token, value in each.top}
            top.append({**likeliest, self._tokens.text(each.token_id): each.logprob})
        return self._lists([each.token_id for each in logprobs], [each.logprob for each in logprobs], top, offsets)

    def _lists(
        self,
        token_ids: list[int],
        logprobs: Sequence[float | None],
        top: Sequence[dict[str, float] | None],
        offsets: list[int],
    ) -> CompletionLogprobs:
        assert self._tokens is not None
        texts = [self._tokens.text(token) for token in token_ids]
        return CompletionLogprobs(tokens=texts, token_logprobs=list(logprobs), top_logprobs=list(top), text_offset=offsets)

    def _completion(self, *choices: CompletionChoice, metrics: ResponseMetrics | None = None) -> Completion:
        extra: dict[str, Any] = {} if metrics is None else {"metrics": metrics}
        return Completion(
            id=self._id, object="text_completion", created=self._created, model=self._model, choices=list(choices), **extra
        )


def _joined(first: CompletionLogprobs | None, second: CompletionLogprobs | None) -> CompletionLogprobs | None:
    """Log-probabilities of one text after another."""
    if first is None or second is None:
        return second
    lists = {name: getattr(first, name) + getattr(second, name) for name in CompletionLogprobs.model_fields}
    return CompletionLogprobs(**lists)
