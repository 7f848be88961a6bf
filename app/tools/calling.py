"""What a request's tools and its choice among them mean for the model that is served."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.errors import InvalidParameterError
from app.structured import Constraint
from app.tools.formats import Format, ToolCallFormat, tool_format
from app.tools.grammar import tool_grammar
from app.tools.parsing import ToolParser
from app.tools.schemas import Tool, ToolChoice, ToolOptions
from speculative.request import Grammar


@dataclass(frozen=True, slots=True)
class Calling:
    """Tools and the choice among them, how the model writes its calls, and the form that an answer without calls must have."""

    tools: Sequence[Tool]
    choice: ToolChoice
    parallel: bool
    format: Format
    form: Constraint | None

    def parser(self) -> ToolParser:
        """A parser for one answer."""
        names = {tool.function.name for tool in self.choice.among(self.tools)}
        return ToolParser(self.format, names, only=self.choice.names is not None)

    def constraints(self) -> list[Constraint]:
        """Grammars to check, each with the parameter it is of; the last, if there is one, is that of the whole answer."""
        form = None if self.form is None else self.form.grammar
        grammar = tool_grammar(self.tools, self.choice, self.parallel, self.format, form)
        if grammar is None:
            return []
        # Strict schemas by themselves too: as part of the whole, what cannot be kept to the letter would go unnoticed.
        strict = [
            Constraint(Grammar("json_schema", json.dumps(tool.function.schema_of_arguments)), f"tools[{place}].function.parameters")
            for place, tool in enumerate(self.tools)
            if tool.function.strict
        ]
        return [*strict, Constraint(grammar, "tools")]


def calling(options: ToolOptions, form: Constraint | None, chosen: ToolCallFormat, tokenizer: Any) -> Calling | None:
    """How this request's tools are called; None where it offers none. ``form`` is its answers', ``chosen`` the server's setting."""
    tools = options.offered_tools
    if not tools:
        return None
    format = tool_format(chosen, tokenizer)
    if format is None:
        message = "This model has no known way of calling tools; the server's --tool-call-format may name one."
        raise InvalidParameterError(message, param="tools")
    choice = options.tool_choice or ToolChoice(type="auto")
    if form is not None and choice.forced:
        if not form.of_text:
            message = f"Invalid value for '{form.param}': with this tool_choice the answer is nothing but calls."
            raise InvalidParameterError(message, param=form.param)
        form = None
    return Calling(tools, choice, options.parallel_tool_calls is not False, format, form)
