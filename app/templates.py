"""Chat templates: a model's, and those that users give in place of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_template(path: Path) -> str:
    """A Jinja template; raises ValueError where it cannot be read or is none."""
    from jinja2 import TemplateError, TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template  # seconds to import, for those who want it

    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not text.strip():
        raise ValueError(f"{path} is empty")
    try:
        render_jinja_template([[{"role": "user", "content": "Hello!"}]], chat_template=text)
    except TemplateSyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.message}") from error
    except (TemplateError, TypeError):
        pass  # here it has neither the model's special tokens nor variables: `chat.fault` is asked once there is a model
    return text


def template_text(tokenizer: Any) -> str:
    """A model's chat template, or all of them where it has several; empty where it has none."""
    templates = getattr(tokenizer, "chat_template", None) or ""
    return "\n".join(templates.values()) if isinstance(templates, dict) else str(templates)
