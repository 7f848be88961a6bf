"""Response bodies, exactly as OpenAI's API has them; ``metrics`` is vLLM's extension and ours.

They are written with ``exclude_unset``: a field that is not passed does not appear, one that is passed as None appears as null.
Fields that always appear have no default, so that forgetting one is a type error.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, Literal

from pydantic import BaseModel

from speculative.request import RequestStats

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


GUARDED = refusals(400, 401, 404, 408, 413, 429, 500, 503)
"""Of a route that generates."""


class PromptTokensDetails(BaseModel):
    """How much of the prompt cost nothing."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """What the completion's tokens were spent on; of predictions only where the caller sent one."""

    reasoning_tokens: int
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Usage(BaseModel):
    """Tokens in and out."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, choices: list[RequestStats], n: int) -> Usage:
        """Usage of a response whose every ``n`` choices share a prompt, which counts once."""
        prompts = choices[::n]
        prompt_tokens = sum(stats.prompt_tokens for stats in prompts)
        completion_tokens = sum(stats.completion_tokens for stats in choices)
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(stats.cached_tokens for stats in prompts)),
            completion_tokens_details=_details(choices),
        )


def _details(choices: list[RequestStats]) -> CompletionTokensDetails:
    accepted = sum(stats.num_accepted_prediction_tokens for stats in choices)
    rejected = sum(stats.num_rejected_prediction_tokens for stats in choices)
    if not accepted + rejected:
        return CompletionTokensDetails(reasoning_tokens=0)
    return CompletionTokensDetails(reasoning_tokens=0, accepted_prediction_tokens=accepted, rejected_prediction_tokens=rejected)


class SpeculativeDecoding(BaseModel):
    """What speculation gained; vLLM's names, and ``num_target_calls`` and ``tokens_per_second``.

    ``num_spec_steps`` counts the verifications that carried a draft, ``num_spec_tokens`` the tokens gained in them: the
    accepted ones and a bonus token each. ``mean_acceptance_length`` is the second over the first, or 1.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    num_target_calls: int
    tokens_per_second: float


class ResponseMetrics(BaseModel):
    """How a response was made."""

    speculative_decoding: SpeculativeDecoding

    @classmethod
    def of(cls, choices: list[RequestStats]) -> ResponseMetrics:
        """Metrics of a whole response, all its choices together."""
        steps = sum(stats.num_drafts for stats in choices)
        drafted = sum(stats.num_draft_tokens for stats in choices)
        accepted = sum(stats.num_accepted_draft_tokens for stats in choices)
        histograms = zip_longest(*(stats.acceptance_histogram for stats in choices), fillvalue=0)
        return cls(
            speculative_decoding=SpeculativeDecoding(
                mean_acceptance_length=1 + accepted / steps if steps else 1.0,
                draft_acceptance_rate=accepted / drafted if drafted else 0.0,
                acceptance_histogram=[sum(counts) for counts in histograms],
                num_spec_steps=steps,
                num_accepted_draft_tokens=accepted,
                num_draft_tokens=drafted,
                num_spec_tokens=accepted + steps,
                num_target_calls=sum(stats.num_target_calls for stats in choices),
                tokens_per_second=_tokens_per_second(choices),
            )
        )


def _tokens_per_second(choices: list[RequestStats]) -> float:
    """Decode speed of the choices together: their tokens after the first over the time since the first."""
    if len(choices) == 1:
        return choices[0].tokens_per_second
    first = [stats.first_token_time for stats in choices if stats.first_token_time is not None]
    last = [stats.last_token_time for stats in choices if stats.last_token_time is not None]
    elapsed = max(last) - min(first) if first and last else 0.0
    return sum(max(stats.completion_tokens - 1, 0) for stats in choices) / elapsed if elapsed > 0 else 0.0


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
    """What the model said: null where it only called tools."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One of ``n`` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


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
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(BaseModel):
    """A chunk's part of one of ``n`` answers."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(BaseModel):
    """One event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    metrics: ResponseMetrics | None = None


class CompletionChoice(BaseModel):
    """One of ``n`` continuations of a prompt, or a chunk of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(BaseModel):
    """The answer to a completion request, or one event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: ResponseMetrics | None = None


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


class Version(BaseModel):
    """GET /version."""

    version: str


class Probe(BaseModel):
    """GET /health and /ready."""

    status: Literal["ok"]
