"""Messages -> prompt token ids; generated text -> chat messages and chunks."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Sequence
from typing import Any

from app.errors import InvalidParameterError
from app.generation import Choice
from app.messages import Message, TemplateOptions
from app.responses import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    ChunkChoice,
    ContentLogprob,
    Delta,
    FinishReason,
    ResponseMetrics,
    TopLogprob,
    Usage,
)
from app.schemas import Prediction
from app.tokens import TokenTexts, encoded
from speculative.request import RequestOutput, TokenLogprob

logger = logging.getLogger("moaserve.app")


def prompt_tokens(tokenizer: Any, messages: Sequence[Message], options: TemplateOptions) -> list[int]:
    """The conversation as the model's chat template writes it, ready for the assistant's turn unless the caller wants otherwise."""
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidParameterError("This model has no chat template; use /v1/completions.", param="messages")
    conversation = [_template_message(message) for message in messages]
    variables = options.chat_template_kwargs or {}
    # Its own parameters are none of the template's variables: one of them is the template.
    if reserved := variables.keys() & inspect.signature(tokenizer.apply_chat_template).parameters.keys():
        raise InvalidParameterError(f"'{min(reserved)}' is no variable of a chat template.", param="chat_template_kwargs")
    continues = bool(options.continue_final_message)
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            conversation,
            add_generation_prompt=not continues if options.add_generation_prompt is None else options.add_generation_prompt,
            continue_final_message=continues,
            tokenize=True,
            return_dict=False,
            **variables,
        )
    except Exception as error:  # a template is a program of the model's, and raises what it likes about its input
        logger.debug("chat template failed", exc_info=error)
        raise InvalidParameterError(f"The model's chat template cannot render these messages: {error}", param="messages") from error
    return ids


def predicted_tokens(tokenizer: Any, prediction: Prediction | None) -> list[int]:
    """What the caller expects the answer to be, as tokens."""
    if prediction is None:
        return []
    return encoded(tokenizer, prediction.content, "prediction.content", add_special_tokens=False)


def _template_message(message: Message) -> dict[str, Any]:
    """A message as templates expect it: no fields that are not set, and tool arguments as objects where they are objects."""
    rendered = message.model_dump(exclude_none=True)
    if message.role == "developer":
        rendered["role"] = "system"
    rendered.setdefault("content", "")
    for call in rendered.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return rendered


def _arguments(text: str) -> Any:
    try:
        arguments = json.loads(text)
    except ValueError:
        return text
    return arguments if isinstance(arguments, dict) else text


class ChatWriter:
    """Words answers as chat completions and their chunks."""

    def __init__(self, response_id: str, created: int, model: str, tokens: TokenTexts | None) -> None:
        self._id = response_id
        self._created = created
        self._model = model
        self._tokens = tokens  # given where log-probabilities are asked for

    def whole(self, choices: Sequence[Choice], usage: Usage, metrics: ResponseMetrics) -> ChatCompletion:
        """The answer to a request that does not stream."""
        return ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=[
                ChatChoice(
                    index=index,
                    message=AssistantMessage(role="assistant", content=choice.text, refusal=None),
                    logprobs=self._logprobs(choice.logprobs),
                    finish_reason=choice.finish_reason,
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage,
            metrics=metrics,
        )

    def begin(self, index: int, first: RequestOutput) -> ChatCompletionChunk:
        """The chunk that names the role."""
        return self._chunk(ChunkChoice(index=index, delta=Delta(role="assistant", content=""), logprobs=None, finish_reason=None))

    def text(self, index: int, output: RequestOutput) -> ChatCompletionChunk:
        """More of the message."""
        delta = Delta(content=output.text_delta)
        return self._chunk(
            ChunkChoice(index=index, delta=delta, logprobs=self._logprobs(output.logprobs or ()), finish_reason=None)
        )

    def finish(self, index: int, reason: FinishReason, metrics: ResponseMetrics | None) -> ChatCompletionChunk:
        """The message's end."""
        return self._chunk(ChunkChoice(index=index, delta=Delta(), logprobs=None, finish_reason=reason), metrics=metrics)

    def summary(self, metrics: ResponseMetrics) -> ChatCompletionChunk:
        """No choice: what was said is of the whole response."""
        return self._chunk(metrics=metrics)

    def _chunk(self, *choices: ChunkChoice, metrics: ResponseMetrics | None = None) -> ChatCompletionChunk:
        extra: dict[str, Any] = {} if metrics is None else {"metrics": metrics}
        return ChatCompletionChunk(
            id=self._id, object="chat.completion.chunk", created=self._created, model=self._model, choices=list(choices), **extra
        )

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        if self._tokens is None:
            return None
        return ChatLogprobs(content=[_content_logprob(self._tokens, each) for each in logprobs], refusal=None)


def _content_logprob(tokens: TokenTexts, one: TokenLogprob) -> ContentLogprob:
    top = [TopLogprob(token=tokens.text(id_), logprob=value, bytes=list(tokens.bytes(id_))) for id_, value in one.top]
    own = tokens.bytes(one.token_id)
    return ContentLogprob(token=tokens.text(one.token_id), logprob=one.logprob, bytes=list(own), top_logprobs=top)
