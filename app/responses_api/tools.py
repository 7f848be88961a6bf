"""Tools and formats as /v1/responses has them: what chat puts into a ``function`` or a ``json_schema`` stands beside its type."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from app import parameters
from app.messages import Schema, StrictModel
from app.structured import JsonSchema, ResponseFormat
from app.tools.schemas import Function, NamedFunction, Tool, ToolChoice


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _functions_only(cls, tool: Any) -> Any:
        if isinstance(tool, dict) and tool.get("type") != "function":
            raise PydanticCustomError("invalid_value", "only tools of type 'function' are supported", {"at": ".type"})
        return parameters.drop_neutral(tool, parameters.RESPONSE_TOOL)

    def nested(self) -> Tool:
        """The same as in chat."""
        return Tool(type="function", function=Function(**self.model_dump(exclude={"type"})))


class NamedTool(StrictModel):
    """The one function to call."""

    type: Literal["function"]
    name: str

    def nested(self) -> ToolChoice:
        """The same as in chat."""
        return ToolChoice(type="function", function=NamedFunction(name=self.name))


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")] | Annotated[NamedTool, Tag("<function>")],
    Discriminator(lambda choice: "<mode>" if isinstance(choice, str) else "<function>"),
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
        return ResponseFormat(type=self.type, json_schema=JsonSchema(name=self.name, schema=self.schema_))

    def told(self) -> dict[str, Any]:
        """As a response tells it back."""
        return self.model_dump(by_alias=True) if self.type == "json_schema" else {"type": self.type}
