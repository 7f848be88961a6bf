"""How models write calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from app.errors import InvalidParameterError
from app.templates import template_text

ToolCallFormat = Literal["auto", "hermes", "llama3_json", "none"]


@dataclass(frozen=True, slots=True)
class Format:
    """What stands around a call: a JSON object that has a name and arguments.

    ``opener`` announces an object and ``closer`` follows it. Where ``bare``, objects also come without an opener: first thing in
    the answer or after another call, with ``;`` between calls. ``begin`` and ``end`` are what models write around the arguments
    in ``begin.format(name=…)``, and ``separator`` what they may write between calls. Arguments come in the order of their schema,
    or ``by_name``.
    """

    opener: str
    closer: str | None
    bare: bool
    begin: str
    end: str
    separator: str
    by_name: bool = False


HERMES = Format(
    "<tool_call>", "</tool_call>", False, '<tool_call>\n{{"name": "{name}", "arguments": ', "}\n</tool_call>", separator="\n"
)
"""Nous Hermes, Qwen2.5, Qwen3 and the bundled model."""

LLAMA3_JSON = Format("<|python_tag|>", None, True, '{{"name": "{name}", "parameters": ', "}", separator="; ")
"""Llama 3.1 and 3.2: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1"""


ARGUMENT_ORDER = "tool_argument_order"
"""A key of tokenizer_config.json: "schema", or "name" where a model has learnt to write arguments in the order of their names. Held
to another order, it leaves out what it would have written first."""


def tool_format(chosen: ToolCallFormat, tokenizer: Any) -> Format | None:
    """The format that was ``chosen``, or that the chat template speaks of; None where there is none that we know.

    Raises InvalidParameterError where the tokenizer's configuration names no order of arguments.
    """
    known: dict[str, Format | None] = {"hermes": HERMES, "llama3_json": LLAMA3_JSON, "none": None}
    format = _detected(tokenizer) if chosen == "auto" else known[chosen]
    order = getattr(tokenizer, "init_kwargs", {}).get(ARGUMENT_ORDER, "schema")
    if order not in ("schema", "name"):
        message = f"This model's tokenizer_config.json has {ARGUMENT_ORDER} {order!r}, which must be 'schema' or 'name'."
        raise InvalidParameterError(message, param="tools")
    return format if format is None or order == "schema" else replace(format, by_name=True)


def _detected(tokenizer: Any) -> Format | None:
    text = template_text(tokenizer)
    if "<tool_call>" in text:
        # Qwen3-Coder writes XML between the same tags, and GLM-4.5 something of its own.
        return None if "<function=" in text or "<arg_key>" in text else HERMES
    if "<|python_tag|>" in text or ("ipython" in text and "parameters" in text):
        return LLAMA3_JSON
    return None
