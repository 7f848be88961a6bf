"""Messages -> prompt token ids; generated text -> chat messages and chunks."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from app.errors import InvalidParameterError
from app.generation import Choice
from app.responses import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChunkChoice,
    Delta,
    FinishReason,
    ResponseMetrics,
    Usage,
)
from app.schemas import Message

logger = logging.getLogger("moaserve.app")


def prompt_tokens(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """The conversation as the model's chat template writes it, ready for the assistant's turn."""
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidParameterError("This model has no chat template; use /v1/completions.", param="messages")
    conversation = [_template_message(message) for message in messages]
    try:
        ids: list[int] = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=True, return_dict=False)
    except Exception as error:  # a template is a program of the model's, and raises what it likes about its input
        logger.debug("chat template failed", exc_info=error)
        raise InvalidParameterError(f"The model's chat template cannot render these messages: {error}", param="messages") from error
    return ids


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

    def __init__(self, response_id: str, created: int, model: str, include_usage: bool) -> None:
        self._id = response_id
        self._created = created
        self._model = model
        # OpenAI has every chunk but the last say "usage": null, once usage was asked for.
        self._extra: dict[str, Any] = {"usage": None} if include_usage else {}

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
                    logprobs=None,
                    finish_reason=choice.finish_reason,
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage,
            metrics=metrics,
        )

    def begin(self, index: int) -> ChatCompletionChunk:
        """The chunk that names the role."""
        return self._chunk([_choice(index, Delta(role="assistant", content=""))], self._extra)

    def text(self, index: int, text: str) -> ChatCompletionChunk:
        """More of the message."""
        return self._chunk([_choice(index, Delta(content=text))], self._extra)

    def finish(self, index: int, reason: FinishReason, metrics: ResponseMetrics | None) -> ChatCompletionChunk:
        """The message's end."""
        extra = self._extra if metrics is None else self._extra | {"metrics": metrics}
        return self._chunk([_choice(index, Delta(), reason)], extra)

    def summary(self, usage: Usage, metrics: ResponseMetrics) -> ChatCompletionChunk:
        """Usage of the whole response."""
        return self._chunk([], {"usage": usage, "metrics": metrics})

    def _chunk(self, choices: list[ChunkChoice], extra: dict[str, Any]) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._id, object="chat.completion.chunk", created=self._created, model=self._model, choices=choices, **extra
        )


def _choice(index: int, delta: Delta, reason: FinishReason | None = None) -> ChunkChoice:
    return ChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=reason)
