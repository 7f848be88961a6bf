"""Request bodies, as OpenAI's API has them; our extensions are marked. What we answer is in `app.responses`.

Requests are strict: a wrong type is refused, not converted, and an unknown field is refused, not dropped.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from app import parameters

INT64 = 2**63


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


def _joined_parts(content: Any) -> Any:
    """Text parts as one string, a line each, as vLLM joins them; other kinds of parts are refused."""
    if not isinstance(content, list):
        return content
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise PydanticCustomError("invalid_value", "only content parts of type 'text' are supported", {"at": f"[{index}].type"})
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError("string_type", "Input should be a valid string", {"at": f"[{index}].text"})
        texts.append(part["text"])
    return "\n".join(texts)


def _listed(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _prompts(prompt: Any) -> list[str] | list[list[int]]:
    """Any of the four forms of ``prompt`` as a list of texts or a list of token lists."""
    prompts = prompt if isinstance(prompt, list) and not _is_token(prompt[:1]) else [prompt]
    if not prompts or len(prompts) > 2048:
        raise PydanticCustomError("invalid_value", "there must be between 1 and 2048 prompts")
    if all(isinstance(one, str) for one in prompts) or all(isinstance(one, list) and _is_token(one) for one in prompts):
        return prompts
    raise PydanticCustomError(
        "prompt_type", "Input should be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    )


def _is_token(ids: list[Any]) -> bool:
    return bool(ids) and all(type(token) is int for token in ids)


StopTexts = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)]


class FunctionCall(_Strict):
    """The function an assistant called, its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(_Strict):
    """A tool call in an assistant's earlier message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(_Strict):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_joined_parts, str | list[dict[str, str]] | None)] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, message: Any) -> Any:
        return parameters.drop_neutral(message, parameters.MESSAGE)

    @model_validator(mode="after")
    def _complete(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("invalid_value", "only assistant messages carry tool calls", {"at": ".tool_calls"})
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("missing", "Field required", {"at": ".content"})
        if self.role == "tool" and self.tool_call_id is None:
            raise PydanticCustomError("missing", "Field required", {"at": ".tool_call_id"})
        return self


class StreamOptions(_Strict):
    """How to stream."""

    include_usage: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, options: Any) -> Any:
        return parameters.drop_neutral(options, parameters.STREAM)


class SamplingRequest(_Strict):
    """What chat and text completions share. ``top_k``, ``min_p`` and ``speculative`` are our extensions."""

    model: str | None = Field(None, description="A name from /v1/models; may be left out, as one model is served.")
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, description="Extension. Only the k likeliest tokens; 0: all.")
    min_p: float | None = Field(None, ge=0, le=1, description="Extension. Drops tokens below this share of the likeliest.")
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stop: Annotated[StopTexts | None, BeforeValidator(_listed, str | list[str] | None)] = None
    n: int | None = Field(None, ge=1, le=128)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculative: bool | None = Field(None, description="Extension. false: decode this request without a drafter.")
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> SamplingRequest:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("invalid_value", "it is only allowed when stream is true", {"at": ".stream_options"})
        return self

    @property
    def include_usage(self) -> bool:
        """True when the stream is to end with a chunk that carries usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate; None: as many as the context holds."""
        return self.max_tokens


class ChatCompletionRequest(SamplingRequest):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, body: Any) -> Any:
        return parameters.drop_neutral(body, parameters.CHAT)

    @model_validator(mode="after")
    def _one_limit(self) -> ChatCompletionRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError("invalid_value", "it contradicts max_completion_tokens", {"at": ".max_tokens"})
        return self

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate; None: as many as the context holds."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(SamplingRequest):
    """POST /v1/completions."""

    prompt: Annotated[
        list[str] | list[list[int]],
        PlainValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
    ]

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, body: Any) -> Any:
        return parameters.drop_neutral(body, parameters.COMPLETION)
