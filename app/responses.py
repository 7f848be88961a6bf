"""Response bodies, exactly as OpenAI's API has them.

They are written with ``exclude_unset``: a field that is not passed does not appear, one that is passed as None appears as null.
Fields that always appear have no default, so that forgetting one is a type error.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from app.usage import ResponseMetrics, Usage
from speculative.request import RequestOutput, Written

FinishReason = Literal["stop", "length", "tool_calls"]


class ErrorInfo(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorInfo


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What a route may answer instead, for the API's description."""
    return {status: {"model": ErrorBody} for status in statuses}


GUARDED = refusals(400, 401, 403, 404, 408, 413, 415, 429, 500, 503)
"""Of a route that generates."""

STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
"""What a route's success is besides JSON, where `stream` is true."""


class TopLogprob(BaseModel):
    """A token that could have stood there; ``bytes`` are its UTF-8, which may be part of a character only."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob):
    """A token of the answer and the likeliest ones there."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of all tokens of a choice or chunk, the one that ends it included."""

    content: list[ContentLogprob]
    refusal: None


class CompletionLogprobs(BaseModel):
    """The same in the completions API: parallel lists. A text's very first token has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TokenOrigin(BaseModel):
    """Text of the answer's token number ``index``: one that was drafted and accepted, or one that the target added itself."""

    index: int
    text: str
    origin: Literal["draft", "target"]


class CalledFunction(BaseModel):
    """The function that the model calls; its arguments are JSON where the model wrote them to the end."""

    name: str
    arguments: str


class ToolCall(BaseModel):
    """A call for the caller to make."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(BaseModel):
    """What the model said: null where it only called tools; ``reasoning_content`` is what it thought before, told by its format."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One of ``n`` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_origins: list[TokenOrigin] | None = None


class ChatCompletion(BaseModel):
    """The answer to a chat request that does not stream."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: ResponseMetrics


class FunctionDelta(BaseModel):
    """More of a called function: its name once, and its arguments' text piece by piece."""

    name: str | None = None
    arguments: str


class ToolCallDelta(BaseModel):
    """More of call number ``index``; the first one has its id and type."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(BaseModel):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(BaseModel):
    """A chunk's part of one of ``n`` answers."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_origins: list[TokenOrigin] | None = None


class EdgeNote(BaseModel):
    """How an edge came by a chunk that it wrote ``offline``, or that takes back what it wrote so.

    With ``replace_from`` the chunk's text stands in the place of all text of the choice from that character on, and its tokens'
    log-probabilities and origins in the place of those from number ``replace_from_token`` on.
    """

    offline: bool
    replace_from: int | None = None
    replace_from_token: int | None = None

    @classmethod
    def of(cls, written: Written, character: int, token: int) -> EdgeNote:
        """The note on an output; a revised one leaves so many characters and tokens of what was told."""
        if written.offline:
            return cls(offline=True)
        return cls(offline=False, replace_from=character, replace_from_token=token)

    @classmethod
    def of_end(cls, output: RequestOutput) -> EdgeNote | None:
        """The note on an answer's end: that it ends there may be the drafter's word alone, too."""
        return cls(offline=True) if output.written is not None and output.written.offline else None


class ChatCompletionChunk(BaseModel):
    """One event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    metrics: ResponseMetrics | None = None
    edge: EdgeNote | None = None


class CompletionChoice(BaseModel):
    """One of ``n`` continuations of a prompt, or a chunk of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_origins: list[TokenOrigin] | None = None


class Completion(BaseModel):
    """The answer to a completion request, or one event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: ResponseMetrics | None = None
    edge: EdgeNote | None = None


class Model(BaseModel):
    """The served model; ``max_model_len`` is vLLM's extension."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    """GET /v1/models."""

    object: Literal["list"]
    data: list[Model]


class Tokens(BaseModel):
    """POST /tokenize; ``token_strs`` only where they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(BaseModel):
    """POST /detokenize."""

    prompt: str


class TokenizerInfo(BaseModel):
    """GET /tokenizer_info, as a tokenizer_config.json has it."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


class Version(BaseModel):
    """GET /version."""

    version: str


class Probe(BaseModel):
    """GET /health and /ready."""

    status: Literal["ok"]
