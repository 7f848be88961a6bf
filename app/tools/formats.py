"""How models write calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

ToolCallFormat = Literal["auto", "hermes", "llama3_json", "none"]


@dataclass(frozen=True, slots=True)
class Format:
    """What stands around a call: a JSON object that has a name and arguments.

    ``opener`` announces an object and ``closer`` follows it. Where ``bare``, objects also come without an opener: first thing in
    the answer or after another call, with ``;`` between calls. ``begin`` and ``end`` are what models write around the arguments
    in ``begin.format(name=…)``, and ``separator`` what they may write between calls.
    """

    opener: str
    closer: str | None
    bare: bool
    begin: str
    end: str
    separator: str


HERMES = Format(
    "<tool_call>", "</tool_call>", False, '<tool_call>\n{{"name": "{name}", "arguments": ', "}\n</tool_call>", separator="\n"
)
"""Nous Hermes, Qwen2.5, Qwen3 and the bundled model."""

LLAMA3_JSON = Format("<|python_tag|>", None, True, '{{"name": "{name}", "parameters": ', "}", separator="; ")
"""Llama 3.1 and 3.2: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1"""


def tool_format(chosen: ToolCallFormat, tokenizer: Any) -> Format | None:
    """The format that was ``chosen``, or that the chat template speaks of; None where there is none that we know."""
    if chosen == "auto":
        return _detected(tokenizer)
    return {"hermes": HERMES, "llama3_json": LLAMA3_JSON, "none": None}[chosen]


def _detected(tokenizer: Any) -> Format | None:
    templates = getattr(tokenizer, "chat_template", None) or ""
    text = "\n".join(templates.values()) if isinstance(templates, dict) else str(templates)
    if "<tool_call>" in text:
        # Qwen3-Coder writes XML between the same tags, and GLM-4.5 something of its own.
        return None if "<function=" in text or "<arg_key>" in text else HERMES
    if "<|python_tag|>" in text or ("ipython" in text and "parameters" in text):
        return LLAMA3_JSON
    return None
