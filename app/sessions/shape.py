"""What a stored response must have to be read: whoever can write to the same Redis may have put something else there."""

from __future__ import annotations

from typing import Any


def is_stored_response(value: Any) -> bool:
    """Whether a JSON value is the list that a stored response is kept as, with all that is ever read of it."""
    match value:
        case [dict() as document, list() as items] | [dict() as document, list() as items, bool()]:
            return _is_document(document) and all(map(_is_item, items))
    return False


def _is_document(document: dict[str, Any]) -> bool:
    match document:
        case {"status": str(), "background": bool(), "output": list() as output}:
            return all(map(_is_item, output))
    return False


def _is_item(item: Any) -> bool:
    match item:
        case {"id": str(), "type": "message", "role": "user" | "assistant" | "system" | "developer", "content": [_, *_] as parts}:
            return all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts)
        case {"id": str(), "type": "function_call", "call_id": str(), "name": str(), "arguments": str()}:
            return isinstance(item.get("namespace"), str | None)
        case {"id": str(), "type": "function_call_output", "call_id": str(), "output": str()}:
            return isinstance(item.get("name"), str | None)
        case {"id": str(), "type": "reasoning"}:
            return True
    return False
