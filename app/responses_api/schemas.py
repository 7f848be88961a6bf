"""Request bodies of /v1/responses, as OpenAI's API has them; our extensions are marked."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from app import parameters
from app.messages import Effort, StrictModel, TemplateOptions, not_longer
from app.responses_api.items import InputItems
from app.responses_api.tools import (
    AllowedChoice,
    Choice,
    FunctionTool,
    NamedTool,
    NamespaceTool,
    OfferedTool,
    TextFormat,
    available,
    model_name,
)
from app.schemas import INT32, SamplingRequest
from app.structured import Constraint, form_of
from app.tools.schemas import MAX_TOOLS, ToolChoice, ToolOptions
from speculative.request import MAX_LOGPROBS

MAX_LEVELS = 128
LOGPROBS = "message.output_text.logprobs"
# The others add to kinds of items that this server never writes.
Includable = Literal[
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]
NEVER_THERE = frozenset(get_args(Includable)) - {LOGPROBS}
"""What can be asked for and is in no answer of this server."""
MOST_METADATA: Final = 16
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=MOST_METADATA),
    BeforeValidator(partial(not_longer, most=MOST_METADATA)),
]


def _as_items(given: Any) -> Any:
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given


def _check(name: str, value: Any, levels: int = MAX_LEVELS) -> None:
    """Refuse what can be sent as JSON but not told back and kept: half a surrogate pair, and depths that no encoder follows."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise PydanticCustomError("invalid_value", "it is not valid Unicode", {"at": f".{name}"}) from None
    elif isinstance(value, dict | list):
        if levels == 0:
            raise PydanticCustomError("invalid_value", "it is nested too deeply", {"at": f".{name}"})
        for each in (*value, *value.values()) if isinstance(value, dict) else value:
            _check(name, each, levels - 1)


class TextOptions(StrictModel):
    """What kind of text is wanted."""

    format: TextFormat | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, options: Any) -> Any:
        return parameters.drop_neutral(options, parameters.RESPONSE_TEXT)


class _Elsewhere(BaseModel):
    """A tool that is left out."""

    type: str


class ReasoningOptions(StrictModel):
    """How to reason."""

    effort: Effort | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, options: Any) -> Any:
        return parameters.drop_neutral(options, parameters.RESPONSE_REASONING)


class ResponseRequest(SamplingRequest, TemplateOptions):
    """POST /v1/responses."""

    input: Annotated[InputItems | None, BeforeValidator(_as_items, str | InputItems | None)] = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=INT32)
    max_tool_calls: int | None = Field(None, ge=1, lt=INT32, description="Of built-in tools; there are none.")
    store: bool | None = Field(None, description="Whether the response can be had again, and gone on with; default true.")
    background: bool | None = None
    include: list[Includable] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[
        list[OfferedTool] | None, Field(max_length=MAX_TOOLS), BeforeValidator(available, list[OfferedTool | _Elsewhere] | None)
    ] = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Metadata | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, body: Any) -> Any:
        for name, value in body.items() if isinstance(body, dict) else ():
            _check(name, value)
        return parameters.drop_neutral(body, parameters.RESPONSE)

    @property
    def effort(self) -> Effort | None:
        """As in TemplateOptions."""
        return self.reasoning.effort if self.reasoning else None

    @model_validator(mode="after")
    def _choice_among_tools(self) -> ResponseRequest:
        if (count := len(self.functions)) > MAX_TOOLS:
            raise PydanticCustomError("too_long", f"there are at most {MAX_TOOLS} functions, not {count}", {"at": ".tools"})
        try:
            _ = self.tool_options
        except ValidationError as error:
            (problem,) = error.errors()
            at = str(problem["ctx"]["at"]).replace(".function.", ".").replace(".allowed_tools.", ".")
            raise PydanticCustomError("invalid_value", "{problem}", {"problem": problem["msg"], "at": at}) from None
        return self

    @model_validator(mode="after")
    def _agree(self) -> ResponseRequest:
        if not self.input and self.previous_response_id is None:
            raise PydanticCustomError("missing", "Field required", {"at": ".input"})
        if self.top_logprobs and LOGPROBS not in (self.include or ()):
            raise PydanticCustomError("invalid_value", f"it is only allowed when include has '{LOGPROBS}'", {"at": ".top_logprobs"})
        if self.background and self.store is False:
            raise PydanticCustomError("invalid_value", "what is not stored cannot be asked for later", {"at": ".background"})
        if self.background and self.stream:
            raise PydanticCustomError("unsupported_parameter", "a background response is polled", {"at": ".stream"})
        if LOGPROBS in (self.include or ()) and self.tool_options.offered_tools:
            raise PydanticCustomError(
                "invalid_value", "log-probabilities are not told where tools may be called", {"at": ".include"}
            )
        return self

    @property
    def functions(self) -> list[tuple[str | None, FunctionTool]]:
        """All functions, each with its namespace, if it has one."""
        found: list[tuple[str | None, FunctionTool]] = []
        for tool in self.tools or ():
            found += [(tool.name, each) for each in tool.tools] if isinstance(tool, NamespaceTool) else [(None, tool)]
        return found

    @property
    def namespaces(self) -> dict[str, tuple[str, str]]:
        """Namespace and name of what the model knows under another name."""
        return {model_name(tool.name, namespace): (namespace, tool.name) for namespace, tool in self.functions if namespace}

    @property
    def tool_options(self) -> ToolOptions:
        """What the request says about tools, as chat has it."""
        choice = self.tool_choice
        return ToolOptions(
            tools=None if self.tools is None else [tool.nested(namespace) for namespace, tool in self.functions],
            tool_choice=choice.nested() if isinstance(choice, NamedTool | AllowedChoice) else choice and ToolChoice(type=choice),
            parallel_tool_calls=self.parallel_tool_calls,
        )

    @property
    def openai_form(self) -> Constraint | None:
        """As in StructuredRequest."""
        return form_of(self.text.format.nested(), "text.format") if self.text and self.text.format else None

    @property
    def token_limit(self) -> int | None:
        """As in SamplingRequest."""
        return self.max_output_tokens

    @property
    def logprob_count(self) -> int | None:
        """As in SamplingRequest."""
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None
