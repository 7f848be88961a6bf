"""Tools and the choice among them, as callers send them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from app.messages import Schema, StrictModel

MAX_TOOLS = 128
Mode = Literal["none", "auto", "required"]
MAX_NAME = 64
FunctionName = Annotated[str, Field(pattern=rf"^[a-zA-Z0-9_-]{{1,{MAX_NAME}}}$")]


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
    def follows_schema(self) -> bool:
        """Whether arguments follow the schema even where the model may choose to call."""
        return bool(self.strict)

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
    """A function by its name alone."""

    name: str


class AllowedTool(StrictModel):
    """One of the tools that may be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(StrictModel):
    """Which of its tools the model may call, and whether it must call one."""

    mode: Literal["auto", "required"]
    tools: list[AllowedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class ToolChoice(StrictModel):
    """Whether the model may, must or must not call a tool, which one it must, or which ones it may."""

    type: Literal[Mode, "function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _tools_where_they_belong(self) -> ToolChoice:
        for name, value in (("function", self.function), ("allowed_tools", self.allowed_tools)):
            if self.type == name and value is None:
                raise PydanticCustomError("missing", "Field required", {"at": f".{name}"})
            if self.type != name and value is not None:
                raise PydanticCustomError("invalid_value", f"it needs the type '{name}'", {"at": f".{name}"})
        return self

    @property
    def forced(self) -> bool:
        """True when the answer must be a call."""
        mode = self.type if self.allowed_tools is None else self.allowed_tools.mode
        return mode in ("required", "function")

    @property
    def names(self) -> list[str] | None:
        """The tools that may be called; None: any."""
        if self.allowed_tools is not None:
            return [tool.function.name for tool in self.allowed_tools.tools]
        return None if self.function is None else [self.function.name]

    def among(self, tools: Sequence[Tool]) -> list[Tool]:
        """Those of the tools that may be called."""
        names = self.names
        return [tool for tool in tools if names is None or tool.function.name in names]


def _choice(given: Any) -> Any:
    """A mode is written as its name, tools as an object."""
    if isinstance(given, str):
        if given not in ("none", "auto", "required"):
            raise PydanticCustomError("invalid_value", "Input should be 'none', 'auto', 'required', a function or allowed tools")
        return {"type": given}
    if isinstance(given, dict) and given.get("type", "function") not in ("function", "allowed_tools"):
        raise PydanticCustomError("invalid_value", "Input should be 'function' or 'allowed_tools'", {"at": ".type"})
    return given


class ToolOptions(StrictModel):
    """The part of a chat request that is about tools."""

    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(_choice, Mode | ToolChoice | None)] = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _choice_among_tools(self) -> ToolOptions:
        names = [tool.function.name for tool in self.tools or ()]
        for place, name in enumerate(names):
            if name in names[:place]:
                raise PydanticCustomError("invalid_value", "another tool has this name", {"at": f".tools[{place}].function.name"})
        choice = self.tool_choice
        if choice is None:
            return self
        if (choice.forced or choice.names) and not names:
            raise PydanticCustomError("invalid_value", "it is only allowed when there are tools", {"at": ".tool_choice"})
        for place, name in enumerate(choice.names or ()):
            if name not in names:
                tool = "" if choice.allowed_tools is None else f".allowed_tools.tools[{place}]"
                raise PydanticCustomError("invalid_value", "no tool has this name", {"at": f".tool_choice{tool}.function.name"})
        return self

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model is told of: none where it must not call any, and all where it may call some of them."""
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return []
        return self.tools or []
