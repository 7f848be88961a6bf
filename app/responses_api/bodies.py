"""What /v1/responses answers, exactly as OpenAI's API has it; ``metrics`` is ours. Written as `app.responses` says."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from app.responses import ContentLogprob
from app.usage import ResponseMetrics
from speculative.request import RequestStats

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
RUNNING: tuple[Status, ...] = ("queued", "in_progress")


class OutputText(BaseModel):
    """Text that the model wrote."""

    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[ContentLogprob]


class OutputMessage(BaseModel):
    """A message of the model's."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class FunctionToolCall(BaseModel):
    """A function that the model wants called, its arguments as JSON text."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class ReasoningText(BaseModel):
    """What the model thought."""

    type: Literal["reasoning_text"]
    text: str


class Reasoning(BaseModel):
    """What the model thought before it answered; nobody sums it up."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[dict[str, Any]]
    content: list[ReasoningText]


OutputItem = Annotated[OutputMessage | FunctionToolCall | Reasoning, Field(discriminator="type")]


class InputTokensDetails(BaseModel):
    """How much of the prompt cost nothing, and how much of it was kept for others at a price: none is."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    """What the output's tokens were spent on."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Tokens in and out."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, stats: RequestStats) -> ResponseUsage:
        """Usage of the request behind a response."""
        return cls(
            input_tokens=stats.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=stats.cached_tokens, cache_write_tokens=0),
            output_tokens=stats.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=stats.num_reasoning_tokens),
            total_tokens=stats.prompt_tokens + stats.completion_tokens,
        )


class ResponseError(BaseModel):
    """Why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class IncompleteDetails(BaseModel):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"]


class ResponseBody(BaseModel):
    """A response, in whatever state: what was asked for, and what has come of it."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None
    metrics: ResponseMetrics | None = None


class ResponseDeleted(BaseModel):
    """DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(BaseModel):
    """POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemList(BaseModel):
    """GET /v1/responses/{id}/input_items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
