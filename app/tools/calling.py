"""What a request's tools and its choice among them mean for the model that is served."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.errors import InvalidParameterError
from app.tools.formats import Format, ToolCallFormat, tool_format
from app.tools.parsing import ToolParser
from app.tools.schemas import Tool, ToolOptions


@dataclass(frozen=True, slots=True)
class Calling:
    """Tools that may be called, and how the model writes its calls."""

    tools: Sequence[Tool]
    format: Format

    def parser(self) -> ToolParser:
        """A parser for one answer."""
        return ToolParser(self.format, {tool.function.name for tool in self.tools})


def calling(options: ToolOptions, chosen: ToolCallFormat, tokenizer: Any) -> Calling | None:
    """How this request's tools are called; None where it offers none. ``chosen`` is the setting."""
    tools = options.offered_tools
    if not tools:
        return None
    format = tool_format(chosen, tokenizer)
    if format is None:
        message = "This model has no known way of calling tools; the server's --tool-call-format may name one."
        raise InvalidParameterError(message, param="tools")
    return Calling(tools, format)
