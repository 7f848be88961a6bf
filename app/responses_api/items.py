"""Items of a conversation: as callers send them -> as they are kept and listed -> messages for the chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from app import parameters
from app.messages import FunctionCall, Message, StrictModel, ToolCall, joined_parts
from app.responses_api.bodies import ItemStatus
from app.responses_api.tools import model_name

Item = dict[str, Any]
"""An item as OpenAI's API lists it."""
PARTS = ("input_text", "output_text", "text")
KINDS = ("message", "function_call", "function_call_output", "item_reference", "reasoning")
_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_.+")


def item_id(kind: str, response_id: str, place: str) -> str:
    """The id of an item that belongs to a response: one can be told from the other."""
    return f"{kind}_{response_id.removeprefix('resp_')}_{place}"


def response_of(item: str) -> str | None:
    """The id of the response that an item with this id belongs to, if it is one of ours."""
    match = _ID.fullmatch(item)
    return f"resp_{match[1]}" if match else None


Texts = Annotated[str, BeforeValidator(partial(joined_parts, kinds=PARTS), str | list[dict[str, Any]])]


class _InputItem(StrictModel):
    id: str | None = None
    status: ItemStatus | None = None

    _neutral: ClassVar = parameters.RESPONSE_ITEM

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, item: Any) -> Any:
        return parameters.drop_neutral(item, cls._neutral)


class InputMessage(_InputItem):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts


class InputCall(_InputItem):
    """A function that the model called, its arguments as JSON text."""

    _neutral: ClassVar = parameters.RESPONSE_CALL
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class InputCallOutput(_InputItem):
    """What the function gave."""

    type: Literal["function_call_output"]
    call_id: str
    name: str | None = None
    output: Texts


class InputReasoning(_InputItem):
    """What a model thought before what follows: told to this one where it can be read, and its template renders it."""

    type: Literal["reasoning"]
    summary: list[dict[str, Any]] = Field(default_factory=list)
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None


class ItemReference(StrictModel):
    """An item of a stored response."""

    type: Literal["item_reference"] = "item_reference"
    id: str


def _kind(item: Any) -> str:
    """An item's type; messages and references may leave it out."""
    if isinstance(item, dict):
        return item.get("type") or ("item_reference" if item.keys() <= {"type", "id"} else "message")
    return str(item.type)


def _known(item: Any) -> Any:
    if not isinstance(item, dict) or _kind(item) not in KINDS:
        raise PydanticCustomError(
            "invalid_value", "only items of types {known} are supported", {"known": ", ".join(KINDS), "at": ".type"}
        )
    return {name: value for name, value in item.items() if (name, value) != ("type", None)}


InputItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[InputCall, Tag("<function_call>")]
    | Annotated[InputCallOutput, Tag("<function_call_output>")]
    | Annotated[InputReasoning, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    Discriminator(lambda item: f"<{_kind(item)}>"),
    BeforeValidator(_known),
]
InputItems = Annotated[list[InputItem], Field(max_length=4096, fail_fast=True)]


def own_id(kind: str, response_id: str, place: int) -> str:
    """The id of the item at this place of a response's input."""
    prefix = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}[kind]
    return item_id(prefix, response_id, f"i{place}")


def kept(item: InputMessage | InputCall | InputCallOutput | InputReasoning, response_id: str, place: int) -> Item:
    """The item as it is kept: with an id, the caller's own where there is one, and all fields that OpenAI's API requires."""
    common = {"id": item.id or own_id(item.type, response_id, place), "type": item.type, "status": item.status or "completed"}
    match item:
        case InputCall():
            namespace = {"namespace": item.namespace} if item.namespace else {}
            return common | {"call_id": item.call_id, "name": item.name, "arguments": item.arguments} | namespace
        case InputCallOutput():
            return common | {"call_id": item.call_id, "output": item.output} | ({"name": item.name} if item.name else {})
        case InputReasoning():
            return common | item.model_dump(exclude_none=True, include={"summary", "content", "encrypted_content"})
        case InputMessage(role="assistant"):
            part: Item = {"type": "output_text", "text": item.content, "annotations": [], "logprobs": []}
        case _:
            part = {"type": "input_text", "text": item.content}
    return common | {"role": item.role, "content": [part]}


def messages(instructions: str | None, items: Sequence[Item]) -> list[Message]:
    """The conversation for the chat template: an assistant's thoughts, its text and the calls that follow it are one message."""
    made = [Message(role="system", content=instructions)] if instructions is not None else []
    thought: str | None = None
    for item in items:
        if item["type"] == "reasoning":
            thought = _thought(item)
            continue
        if item["type"] == "message":
            said = Message(role=item["role"], content="\n".join(part["text"] for part in item["content"]))
            made.append(said.model_copy(update={"reasoning_content": thought}) if said.role == "assistant" else said)
        elif item["type"] == "function_call":
            name = model_name(item["name"], item.get("namespace"))
            call = ToolCall(id=item["call_id"], function=FunctionCall(name=name, arguments=item["arguments"]))
            if made and made[-1].role == "assistant" and not thought:
                said = made.pop()
                made.append(said.model_copy(update={"tool_calls": [*(said.tool_calls or ()), call]}))
            else:
                made.append(Message(role="assistant", tool_calls=[call], reasoning_content=thought))
        elif item["type"] == "function_call_output":
            made.append(Message(role="tool", content=item["output"], tool_call_id=item["call_id"], name=item.get("name")))
        thought = None
    return made


def _thought(item: Item) -> str | None:
    """What a reasoning item says in words: other servers' are encrypted, or summed up."""
    parts = [part.get("text") for part in item.get("content") or () if part.get("type") == "reasoning_text"]
    return "\n".join(text for text in parts if isinstance(text, str)) or None
