"""Tools and the choice among them, as callers send them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from app.messages import Schema, StrictModel

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(StrictModel):
    """A function that the model may call; ``parameters`` is the JSON schema of its arguments, left out where it takes none."""

    name: FunctionName
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = Field(None, description="Arguments always follow the schema; forced calls do so anyway.")

    @field_validator("parameters")
    @classmethod
    def _arguments_are_an_object(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        if parameters and parameters.get("type", "object") != "object":
            raise PydanticCustomError("invalid_value", "a function's arguments are an object", {"at": ".type"})
        return parameters

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """The JSON schema of its arguments; without parameters only the empty object follows it."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object"} | self.parameters


class Tool(StrictModel):
    """Something the model may use; only functions are known."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: ``strict`` is not the model's business, and parameters are always there."""
        described = self.function.model_dump(include={"name", "description"}, exclude_none=True)
        parameters = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": described | {"parameters": parameters}}


class NamedFunction(StrictModel):
    """The one function to call."""

    name: str


class ToolChoice(StrictModel):
    """Whether the model may, must or must not call a tool, or which one it must."""

    type: Literal["none", "auto", "required", "function"]
    function: NamedFunction | None = None

    @property
    def forced(self) -> bool:
        """True when the answer must be a call."""
        return self.type in ("required", "function")


def _choice(given: Any) -> Any:
    """A mode is written as its name, a function as an object."""
    if isinstance(given, str):
        if given not in ("none", "auto", "required"):
            raise PydanticCustomError("invalid_value", "Input should be 'none', 'auto', 'required' or a function")
        return {"type": given}
    if isinstance(given, dict):
        if given.get("type", "function") != "function":
            raise PydanticCustomError("invalid_value", "Input should be 'function'", {"at": ".type"})
        if "type" in given and given.get("function") is None:
            raise PydanticCustomError("missing", "Field required", {"at": ".function"})
    return given


class ToolOptions(StrictModel):
    """The part of a chat request that is about tools."""

    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Annotated[
        ToolChoice | None, BeforeValidator(_choice, Literal["none", "auto", "required"] | dict[str, Any] | None)
    ] = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _choice_among_tools(self) -> ToolOptions:
        names = [tool.function.name for tool in self.tools or ()]
        for place, name in enumerate(names):
            if name in names[:place]:
                raise PydanticCustomError("invalid_value", "another tool has this name", {"at": f".tools[{place}].function.name"})
        if self.tool_choice is not None and self.tool_choice.forced and not names:
            raise PydanticCustomError("invalid_value", "it is only allowed when there are tools", {"at": ".tool_choice"})
        if self.tool_choice is not None and self.tool_choice.function and self.tool_choice.function.name not in names:
            raise PydanticCustomError("invalid_value", "no tool has this name", {"at": ".tool_choice.function.name"})
        return self

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model is told of: none where it must not call any."""
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return []
        return self.tools or []
