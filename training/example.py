"""One conversation as a corpus has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation and where it stands, for messages: ``source`` is ``file:line`` or ``dataset row``."""

    source: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
