"""Events of a response's stream, as OpenAI's API has them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from app.responses import ContentLogprob, EdgeNote
from app.responses_api.bodies import OutputItem, OutputText, ReasoningText, ResponseBody


class ResponseEvent(BaseModel):
    """The response as a whole: it begins, or has ended in one of three ways; ``edge`` as in TextDelta, of its end."""

    type: Literal["response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"]
    sequence_number: int
    response: ResponseBody
    edge: EdgeNote | None = None


class ItemEvent(BaseModel):
    """An item of the output begins, or is complete."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutputItem


class PartEvent(BaseModel):
    """A part of a message, or of thoughts, begins, or is complete."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class TextDelta(BaseModel):
    """More text of a part, or log-probabilities of tokens that are no whole text yet; ``edge`` is ours, and of an edge's own."""

    type: Literal["response.output_text.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[ContentLogprob]
    edge: EdgeNote | None = None


class TextDone(BaseModel):
    """The whole text of a part."""

    type: Literal["response.output_text.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[ContentLogprob]


class ReasoningDelta(BaseModel):
    """More of what the model thinks."""

    type: Literal["response.reasoning_text.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningDone(BaseModel):
    """All that it thought."""

    type: Literal["response.reasoning_text.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str


class ArgumentsDelta(BaseModel):
    """More of a call's arguments, as text; ``edge`` as in TextDelta."""

    type: Literal["response.function_call_arguments.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    delta: str
    edge: EdgeNote | None = None


class ArgumentsDone(BaseModel):
    """All of a call's arguments."""

    type: Literal["response.function_call_arguments.done"]
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


Event = (
    ResponseEvent | ItemEvent | PartEvent | TextDelta | TextDone | ReasoningDelta | ReasoningDone | ArgumentsDelta | ArgumentsDone
)
