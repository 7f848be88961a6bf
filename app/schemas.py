"""Request bodies, as OpenAI's API has them; our extensions are marked. What we answer is in `app.responses`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BeforeValidator, Field, PlainValidator, field_validator, model_validator
from pydantic_core import PydanticCustomError

from app import parameters
from app.messages import Effort, Message, StrictModel, TemplateOptions, joined_parts, not_longer
from app.structured import Constraint, ResponseFormat, StructuredRequest, form_of
from app.tools.schemas import Tool, ToolOptions
from speculative.request import MAX_LOGPROBS

T = TypeVar("T")
INT32, INT64 = 2**31, 2**63
"""What numbers stay below that the engine keeps in so many bits."""
COUNTS: Final = (
    "top_k", "seed", "min_tokens", "priority", "n", "best_of", "max_tokens", "max_completion_tokens", "max_output_tokens",
    "logprobs", "top_logprobs",
)  # fmt: skip
"""Parameters that are whole numbers, of some request or other."""
MOST_BIASES: Final = 1024


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


_TOKEN_KEY = re.compile("0|[1-9][0-9]{0,9}")  # one way of writing each, so that no key stands for another


def _token_keys(bias: Any) -> Any:
    """JSON's keys are strings, OpenAI's are token ids."""
    if not isinstance(bias, dict):
        return bias
    not_longer(bias, MOST_BIASES)
    wrong = next((key for key in bias if not (isinstance(key, str) and _TOKEN_KEY.fullmatch(key))), None)
    if wrong is not None:
        raise PydanticCustomError("invalid_value", "its keys must be token ids, not {key}", {"key": repr(str(wrong)[:32])})
    return {int(key): value for key, value in bias.items()}


def _texts(metadata: Any) -> Any:
    """Tell the first value that is none, where there may be very many."""
    if isinstance(metadata, dict):
        wrong = next((name for name, value in metadata.items() if not isinstance(value, str)), None)
        if wrong is not None:
            raise PydanticCustomError("string_type", "Input should be a valid string", {"at": f".{wrong}"})
    return metadata


def _is_token(ids: list[Any]) -> bool:
    return bool(ids) and all(type(token) is int for token in ids)


_Text = Annotated[str, Field(min_length=1)]
_Some = Annotated[list[T], Field(min_length=1)]
LogitBias = Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MOST_BIASES)]
Identifier = Annotated[str, Field(max_length=1024)]
"""Whatever callers tell requests apart by."""
StopTexts = Annotated[list[Annotated[str, Field(min_length=1, max_length=1000)]], Field(max_length=16)]


class Prediction(StrictModel):
    """What the caller expects the answer to be."""

    type: Literal["content"]
    content: Annotated[str, BeforeValidator(joined_parts, str | list[dict[str, str]])]


class StreamOptions(StrictModel):
    """How to stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="Extension. Usage so far in every chunk.")
    continuous_metrics: bool | None = Field(None, description="Extension. Metrics so far in every chunk.")

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, options: Any) -> Any:
        return parameters.drop_neutral(options, parameters.STREAM)


class SamplingRequest(StructuredRequest):
    """What all that generate share. Extensions are vLLM's; ``speculative`` is ours, and so is what tells of it."""

    model: str | None = Field(None, description="A name from /v1/models; may be left out, as one model is served.")
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=INT32, description="Extension. Only the k likeliest tokens; 0 or -1: all.")
    min_p: float | None = Field(None, ge=0, le=1, description="Extension. Drops tokens below this share of the likeliest.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(
        None, gt=0, le=100, description="Extension. As in transformers; 1 is off. repeat_penalty, as llama.cpp has it, is the same."
    )
    logit_bias: Annotated[LogitBias | None, BeforeValidator(_token_keys, dict[str, float] | None)] = None
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stop: Annotated[StopTexts | None, BeforeValidator(_listed, str | list[str] | None)] = None
    stop_token_ids: list[int] | None = Field(None, max_length=128, description="Extension. Tokens that end the text.")
    min_tokens: int | None = Field(None, ge=0, lt=INT32, description="Extension. Nothing ends the text before this many tokens.")
    ignore_eos: bool | None = Field(None, description="Extension. The model's end tokens do not end the text.")
    stream: bool | None = None
    speculative: bool | None = Field(
        None, description="Extension. false: decode without a drafter; true: draft even where that is slower."
    )
    priority: int | None = Field(None, ge=-INT64, lt=INT64, description="Extension. Of waiting requests the lowest begins first.")
    cache_salt: Identifier | None = Field(
        None, min_length=1, description="Extension. Cached prompts are shared among requests of equal salts only."
    )
    user: Identifier | None = None
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_texts, dict[str, str] | None)] = None
    safety_identifier: Identifier | None = None
    prompt_cache_key: Identifier | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_name(cls, body: Any) -> Any:
        if isinstance(body, dict) and "repeat_penalty" in body and body.get("repetition_penalty") is None:
            return {"repetition_penalty" if name == "repeat_penalty" else name: value for name, value in body.items()}
        return body

    @field_validator(*COUNTS, mode="before", check_fields=False)
    @classmethod
    def _whole(cls, number: Any) -> Any:
        """JSON makes no difference between 10 and 10.0, and some clients send the latter."""
        return int(number) if isinstance(number, float) and number.is_integer() else number

    @property
    def token_limit(self) -> int | None:
        """The most tokens to generate; None: as many as the context holds."""
        return None

    @property
    def candidates(self) -> int:
        """How many answers are generated for each prompt."""
        return 1

    @property
    def logprob_count(self) -> int | None:
        """How many alternatives are told of each generated token; None: not even its own log-probability."""
        return None

    @property
    def prompt_logprob_count(self) -> int | None:
        """The same of the prompt's tokens."""
        return None


class ChoicesRequest(SamplingRequest):
    """What chat and text completions share besides: several choices, and streams that tell usage when asked."""

    max_tokens: int | None = Field(None, ge=1, lt=INT32)
    n: int | None = Field(None, ge=1, le=128)
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    return_token_origins: bool | None = Field(
        None, description="Extension. Tell of each token whether it was drafted, or is the model's own."
    )

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> ChoicesRequest:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("invalid_value", "it is only allowed when stream is true", {"at": ".stream_options"})
        return self

    @property
    def openai_form(self) -> Constraint | None:
        """As in StructuredRequest."""
        return form_of(self.response_format, "response_format")

    @property
    def include_usage(self) -> bool:
        """True when the stream is to end with a chunk that carries usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """True when every chunk is to tell usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def continuous_metrics(self) -> bool:
        """True when every chunk is to tell metrics so far."""
        return bool(self.stream_options and self.stream_options.continuous_metrics)

    @property
    def token_limit(self) -> int | None:
        """As in SamplingRequest."""
        return self.max_tokens

    @property
    def candidates(self) -> int:
        """As in SamplingRequest."""
        return self.n or 1


class ChatCompletionRequest(ChoicesRequest, TemplateOptions, ToolOptions):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=INT32)
    prediction: Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    reasoning_effort: Effort | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, body: Any) -> Any:
        return parameters.drop_neutral(body, parameters.CHAT)

    @model_validator(mode="after")
    def _one_limit(self) -> ChatCompletionRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError("invalid_value", "it contradicts max_completion_tokens", {"at": ".max_tokens"})
        return self

    @model_validator(mode="after")
    def _top_of_something(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("invalid_value", "it is only allowed when logprobs is true", {"at": ".top_logprobs"})
        return self

    @model_validator(mode="after")
    def _origins_of_text_alone(self) -> ChatCompletionRequest:
        if self.return_token_origins and self.offered_tools:
            raise PydanticCustomError(
                "invalid_value", "origins are not told where tools may be called", {"at": ".return_token_origins"}
            )
        return self

    @property
    def effort(self) -> Effort | None:
        """As in TemplateOptions."""
        return self.reasoning_effort

    @property
    def token_limit(self) -> int | None:
        """As in SamplingRequest."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def token_limit_name(self) -> str:
        """Of its two names the one that was used."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def logprob_count(self) -> int | None:
        """As in SamplingRequest."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(ChoicesRequest):
    """POST /v1/completions."""

    prompt: Annotated[
        list[str] | list[list[int]],
        PlainValidator(_prompts, json_schema_input_type=_Text | _Some[_Text] | _Some[int] | _Some[_Some[int]]),
    ]
    max_tokens: int | None = Field(
        None, ge=0, lt=INT32, description="0 generates nothing: with echo and logprobs the prompt is scored."
    )
    best_of: int | None = Field(None, ge=1, le=128)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, body: Any) -> Any:
        return parameters.drop_neutral(body, parameters.COMPLETION)

    @model_validator(mode="after")
    def _best_are_some(self) -> CompletionRequest:
        if self.best_of is not None:
            if self.best_of < (self.n or 1):
                raise PydanticCustomError("invalid_value", "it must be at least n", {"at": ".best_of"})
            if self.stream and self.best_of > (self.n or 1):
                raise PydanticCustomError("invalid_value", "which is best is not known while streaming", {"at": ".best_of"})
        return self

    @property
    def candidates(self) -> int:
        """As in SamplingRequest: ``best_of`` of them, if that is given."""
        return self.best_of or self.n or 1

    @property
    def logprob_count(self) -> int | None:
        """As in SamplingRequest; to choose the best, all are scored."""
        return self.logprobs if self.logprobs is not None or self.candidates == (self.n or 1) else 0

    @property
    def prompt_logprob_count(self) -> int | None:
        """As in SamplingRequest."""
        return self.logprobs if self.echo else None


# What says how one kind of text is tokenized, and the value with which it changes nothing about the other kind.
_OF_PROMPT: Final[dict[str, Any]] = {"add_special_tokens": False}
_OF_MESSAGES: Final[dict[str, Any]] = {
    "tools": [],
    "add_generation_prompt": True,
    "continue_final_message": False,
    "chat_template_kwargs": {},
}


class TokenizeRequest(TemplateOptions):
    """POST /tokenize, as vLLM has it: a ``prompt``, or ``messages`` as the chat template writes them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[Tool] | None = Field(None, max_length=128)
    add_special_tokens: bool | None = Field(
        None,
        description="Whether a prompt gets those that the tokenizer adds; default true. Conversations have those of the template.",
    )
    return_token_strs: bool | None = Field(None, description="Tell each token's text too.")

    @model_validator(mode="after")
    def _one_text(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("invalid_value", "give either prompt or messages", {"at": ".prompt"})
        return self

    @model_validator(mode="after")
    def _nothing_for_the_other(self) -> TokenizeRequest:
        idle, other = (_OF_MESSAGES, "messages") if self.messages is None else (_OF_PROMPT, "a prompt")
        for name, neutral in idle.items():
            if getattr(self, name) not in (None, neutral):
                raise PydanticCustomError("invalid_value", "it is only allowed with {other}", {"at": f".{name}", "other": other})
        return self


class DetokenizeRequest(StrictModel):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
