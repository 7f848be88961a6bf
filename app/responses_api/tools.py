"""Tools and formats as /v1/responses has them: what chat puts into a ``function`` or a ``json_schema`` stands beside its type."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from app import parameters
from app.messages import Schema, StrictModel
from app.structured import JsonSchema, ResponseFormat
from app.tools.schemas import (
    MAX_NAME,
    MAX_TOOLS,
    AllowedTool,
    AllowedTools,
    Function,
    FunctionName,
    Mode,
    NamedFunction,
    Tool,
    ToolChoice,
)

ELSEWHERE: Final = frozenset(
    (
        "apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search", "image_generation",
        "local_shell", "mcp", "shell", "tool_search", "web_search", "web_search_2025_08_26", "web_search_preview",
        "web_search_preview_2025_03_11",
    )
)  # fmt: skip
"""Kinds of tools that OpenAI's API has and this server has not."""
_BETWEEN: Final = "__"
"""Stands between a namespace and a name."""


def available(tools: Any) -> Any:
    """The tools without those that are not to be had here, as if the model never called these, unless there are no others.

    Coding agents name such tools in each request, whether their server has them or not. A response tells which tools there were.
    """
    if not isinstance(tools, list):
        return tools
    return [tool for tool in tools if not _is_elsewhere(tool)] or tools


def _is_elsewhere(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind in ELSEWHERE


class _StrictUnlessSaid(Function):
    """A function as chat knows it. Where it does not say whether it is strict, calls follow its schema as far as that can be kept.

    Source: "Strict mode" in OpenAI's guide to function calling: what leaves out ``strict`` is strict in Responses and not in chat.
    """

    @property
    def follows_schema(self) -> bool:
        return self.strict is not False


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _functions_only(cls, tool: Any) -> Any:
        if isinstance(tool, dict) and tool.get("type") != "function":
            raise PydanticCustomError("invalid_value", "only tools of type 'function' are supported", {"at": ".type"})
        return parameters.drop_neutral(tool, parameters.RESPONSE_TOOL)

    def nested(self, namespace: str | None = None) -> Tool:
        """The same as in chat, under the name by which the model knows it."""
        function = self.model_dump(exclude={"type"}) | {"name": model_name(self.name, namespace)}
        return Tool(type="function", function=_StrictUnlessSaid(**function))


class NamespaceTool(StrictModel):
    """Functions under a common name, such as those of one MCP server."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: Annotated[list[FunctionTool], Field(min_length=1, max_length=MAX_TOOLS), BeforeValidator(available, list[FunctionTool])]

    @model_validator(mode="after")
    def _names_are_short(self) -> NamespaceTool:
        for place, tool in enumerate(self.tools):
            if len(model_name(tool.name, self.name)) > MAX_NAME:
                message = f"with its namespace it is longer than {MAX_NAME - len(_BETWEEN)} characters"
                raise PydanticCustomError("invalid_value", message, {"at": f".tools[{place}].name"})
        return self


def model_name(name: str, namespace: str | None) -> str:
    """What a function is called where there are no namespaces: in prompts and in what models write."""
    return name if namespace is None else f"{namespace}{_BETWEEN}{name}"


OfferedTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[NamespaceTool, Tag("<namespace>")],
    Discriminator(lambda tool: "<namespace>" if _type_of(tool) == "namespace" else "<function>"),
]


class NamedTool(StrictModel):
    """A function by its name alone: the one to call, or one of those that may be called."""

    type: Literal["function"]
    name: str

    def nested(self) -> ToolChoice:
        """The same as in chat."""
        return ToolChoice(type="function", function=NamedFunction(name=self.name))


class AllowedChoice(StrictModel):
    """Which of its tools the model may call, and whether it must call one."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)

    def nested(self) -> ToolChoice:
        """The same as in chat."""
        tools = [AllowedTool(type=tool.type, function=NamedFunction(name=tool.name)) for tool in self.tools]
        return ToolChoice(type=self.type, allowed_tools=AllowedTools(mode=self.mode, tools=tools))


def _kind(choice: Any) -> str:
    if isinstance(choice, str):
        return "<mode>"
    return "<allowed_tools>" if _type_of(choice) == "allowed_tools" else "<function>"


def _type_of(given: Any) -> Any:
    return given.get("type") if isinstance(given, dict) else getattr(given, "type", None)


Choice = Annotated[
    Annotated[Mode, Tag("<mode>")] | Annotated[NamedTool, Tag("<function>")] | Annotated[AllowedChoice, Tag("<allowed_tools>")],
    Discriminator(_kind),
]


class TextFormat(StrictModel):
    """Any text, any JSON object, or JSON that a schema describes."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> TextFormat:
        for name, value in (("name", self.name), ("schema", self.schema_)):
            if self.type == "json_schema" and value is None:
                raise PydanticCustomError("missing", "Field required", {"at": f".{name}"})
            if self.type != "json_schema" and value is not None:
                raise PydanticCustomError("invalid_value", "it needs the type 'json_schema'", {"at": f".{name}"})
        return self

    def nested(self) -> ResponseFormat:
        """The same as in chat."""
        if self.name is None:
            return ResponseFormat(type=self.type)
        return ResponseFormat(type=self.type, json_schema=JsonSchema(name=self.name, schema=self.schema_, strict=self.strict))

    def told(self) -> dict[str, Any]:
        """As a response tells it back."""
        return self.model_dump(by_alias=True) if self.type == "json_schema" else {"type": self.type}
