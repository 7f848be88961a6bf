"""Conversations as callers send them, and how a chat template is to render them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError

from app import parameters


def _fail_fast(schema: Any) -> None:
    """Have every list of a schema of pydantic's end at its first problem."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for inner in schema.values():
            _fail_fast(inner)
    elif isinstance(schema, list):
        for inner in schema:
            _fail_fast(inner)


class StrictModel(BaseModel):
    """What callers send: a wrong type is refused, not converted, and an unknown field is refused, not dropped.

    One problem is told, and there could be as many as there are values: of a list's the first is looked for, and of fields that are
    more than there can be the first unknown one.
    """

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        """As in BaseModel."""
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _not_more_than_there_are(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > len(cls.model_fields):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            unknown = next(name for name in given if name not in known)
            raise PydanticCustomError("extra_forbidden", "Extra inputs are not permitted", {"at": f".{unknown}"})
        return given


DEEPEST = 64
"""Levels of a JSON schema: llguidance reads 128 at most, and a schema may be part of a larger grammar."""


def _not_too_deep(schema: Any) -> Any:
    level = [schema]
    for _ in range(DEEPEST):
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return schema
    raise PydanticCustomError("invalid_value", "it is nested deeper than {deepest} levels", {"deepest": DEEPEST})


Schema = Annotated[dict[str, Any], AfterValidator(_not_too_deep)]
"""A JSON schema."""


def not_longer(given: Any, most: int) -> Any:
    """The same, unless it is an object of more than ``most`` keys; asked before pydantic looks for the problem of each."""
    if isinstance(given, dict) and len(given) > most:
        raise PydanticKnownError("too_long", {"field_type": "Dictionary", "max_length": most, "actual_length": len(given)})
    return given


def joined_parts(content: Any, kinds: Sequence[str] = ("text",)) -> Any:
    """Text parts as one string, a line each, as vLLM joins them; parts that are none of these ``kinds`` are refused.

    A refusal, which another model has written, is a text too.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in (*kinds, "refusal"):
            named = " or ".join(map(repr, kinds))
            message = "only content parts of type {named} are supported"
            raise PydanticCustomError("invalid_value", message, {"named": named, "at": f"[{index}].type"})
        text = "refusal" if kind == "refusal" else "text"
        if not isinstance(part.get(text), str):
            raise PydanticCustomError("string_type", "Input should be a valid string", {"at": f"[{index}].{text}"})
        texts.append(part[text])
    return "\n".join(texts)


class FunctionCall(StrictModel):
    """The function an assistant called, its arguments as JSON text."""

    name: str
    arguments: str

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, call: Any) -> Any:
        return parameters.drop_neutral(call, parameters.FUNCTION_CALL)


class ToolCall(StrictModel):
    """A tool call in an assistant's earlier message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, call: Any) -> Any:
        return parameters.drop_neutral(call, parameters.TOOL_CALL)


class Message(StrictModel):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(joined_parts, str | list[dict[str, str]] | None)] = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(None, description="Extension. What an assistant thought, for templates that render it.")

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, message: Any) -> Any:
        if isinstance(message, dict):
            message = _with_our_names(message)
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


def _with_our_names(message: dict[str, Any]) -> dict[str, Any]:
    """A message with what others call otherwise: a refusal is what was said, and vLLM's ``reasoning`` what was thought."""
    moved = dict(message)
    if moved.get("refusal") and not moved.get("content"):
        moved["content"] = moved.pop("refusal")
    thoughts = moved.pop("reasoning", None)
    if thoughts is not None and not moved.get("reasoning_content"):
        moved["reasoning_content"] = thoughts
    if moved.get("reasoning_content") and moved.get("content") is None:
        moved["content"] = ""  # it was cut off as it thought
    return moved


def _known_effort(effort: Any) -> Any:
    if effort not in ("none", None):
        raise PydanticCustomError("unsupported_parameter", "this server does not support it yet")
    return effort


Effort = Annotated[
    Literal["none"],
    BeforeValidator(_known_effort),
    Field(description="No thoughts, where the chat template knows enable_thinking, as Qwen3's does."),
]
"""OpenAI's measures of thinking, of which templates know but this one."""


class TemplateOptions(StrictModel):
    """How a chat template renders; all vLLM's extensions."""

    add_generation_prompt: bool | None = Field(None, description="Extension. false: the template does not open a new answer.")
    continue_final_message: bool | None = Field(None, description="Extension. The answer continues the last message.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=64, description="Extension. Variables for the chat template."
    )

    @model_validator(mode="after")
    def _options_agree(self) -> TemplateOptions:
        if self.add_generation_prompt and self.continue_final_message:
            raise PydanticCustomError(
                "invalid_value", "it contradicts add_generation_prompt: true", {"at": ".continue_final_message"}
            )
        return self

    @property
    def effort(self) -> Effort | None:
        """How much the model is to think; None: as it does by itself."""
        return None

    @property
    def variables(self) -> dict[str, Any]:
        """What the template is told, besides the conversation."""
        return ({"enable_thinking": False} if self.effort == "none" else {}) | (self.chat_template_kwargs or {})
