"""Streams put together again, as clients do it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def reassembled(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """What the same request without a stream answers, less ids and metrics: ``choices`` and ``usage``."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for part in chunk["choices"]:
            index = part["index"]
            choice = choices.setdefault(index, {"index": index, "logprobs": None, "finish_reason": None})
            assert choice["finish_reason"] is None, "a choice goes on after its end"
            if "delta" in part:
                _merge(choice.setdefault("message", {"refusal": None}), part["delta"])
            else:
                choice["text"] = choice.get("text", "") + part["text"]
            choice["logprobs"] = _joined(choice["logprobs"], part["logprobs"])
            choice["finish_reason"] = part["finish_reason"]
    return {"choices": [_without_ids(choices[index]) for index in sorted(choices)], "usage": usage}


def revised_tokens(chunks: Iterable[dict[str, Any]], echoed: str = "", echoed_tokens: int = 0) -> list[dict[str, Any]]:
    """The origins of one choice's tokens for a client that minds `edge.replace_from` and `edge.replace_from_token`."""
    tokens: list[dict[str, Any]] = []
    for chunk in chunks:
        note = chunk.get("edge") or {}
        if note.get("replace_from") is not None:
            del tokens[note["replace_from_token"] - echoed_tokens :]
            stands = note["replace_from"] - len(echoed)
            for token in tokens:
                token["text"] = token["text"][:stands]
                stands -= len(token["text"])
            assert stands == 0, "all text that stands is of a token that stands"
        for part in (part for part in chunk["choices"] if "token_origins" in part):
            pieces = part["token_origins"]
            assert "".join(piece["text"] for piece in pieces) == (part["text"] if "text" in part else part["delta"]["content"])
            for piece in pieces:
                if piece["index"] == len(tokens):
                    tokens.append(dict(piece))
                else:
                    assert tokens[piece["index"]]["origin"] == piece["origin"]
                    tokens[piece["index"]]["text"] += piece["text"]
    return tokens


def _merge(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Texts grow; parts of a list are told apart by their index; what else there is stays as it came first."""
    for name, value in delta.items():
        if name not in message or message[name] is None:
            message[name] = [dict(part) for part in value] if isinstance(value, list) else value
        elif isinstance(value, list):
            for part in value:
                known = next((each for each in message[name] if each["index"] == part["index"]), None)
                if known is None:
                    message[name].append(dict(part))
                else:
                    _merge(known, part)
        elif isinstance(value, dict):
            _merge(message[name], value)
        elif isinstance(value, str) and name not in ("role", "id", "type"):
            message[name] += value


def _joined(before: dict[str, Any] | None, more: dict[str, Any] | None) -> dict[str, Any] | None:
    if before is None or more is None:
        return more or before
    return {name: before[name] if more[name] is None else (before[name] or []) + more[name] for name in more}


def without_times(document: dict[str, Any]) -> dict[str, Any]:
    """What of a whole answer does not differ from one time to the next."""
    return {"choices": [_without_ids(choice) for choice in document["choices"]], "usage": document["usage"]}


def _without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    """Calls get a new id each time, and an index in streams only; a message of calls alone has no content, or none yet."""
    message = choice.get("message", {})
    for call in message.get("tool_calls", ()):
        assert call.pop("id").startswith("call_")
        call.pop("index", None)
        message["content"] = message["content"] or None
    return choice
