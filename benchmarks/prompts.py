"""Prompts to measure with: the bundled ones, or a JSONL file of dialogues, questions or plain prompts."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

BUNDLED_PROMPTS = Path(__file__).parent / "data" / "prompts.jsonl"


class PromptError(Exception):
    """A prompt file cannot be used; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, tokenized, and where it comes from.

    ``text`` is what was tokenized and ``messages`` what that was rendered from, tools left out. ``answer_tokens`` is the length of
    the file's own answer, None where it has none or nobody asked. Of prompts of a ``conversation`` each begins with the one before.
    """

    source: str
    token_ids: tuple[int, ...]
    text: str = field(default="", compare=False, repr=False)
    messages: tuple[dict[str, Any], ...] = field(default=(), compare=False, repr=False)
    answer_tokens: int | None = field(default=None, compare=False)
    conversation: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class _Asked:
    text: str
    messages: tuple[dict[str, Any], ...]
    answer: str | None


def load_prompts(
    path: Path, tokenizer: PreTrainedTokenizerBase, *, count: int, max_tokens: int, seed: int, with_answers: bool = False
) -> list[Prompt]:
    """``count`` prompts of at most ``max_tokens`` tokens, drawn with ``seed``.

    A line holds ``{"messages": […], "tools": […]?}`` (cut before one of its assistant turns, drawn too), ``{"turns": […]}`` (the
    first is asked) or ``{"prompt": "…"}`` (continued as it stands). ``with_answers`` counts the tokens of that assistant turn, or
    of the line's ``"reference"``, a text or a text for each turn.

    Raises PromptError for a line that is none of these, or where none is short enough.
    """
    rng, prompts = random.Random(seed), list[Prompt]()
    for place, row in _drawn(path, max_tokens, rng):
        if len(prompts) == count:
            break
        with _problems(place):
            asked = _asked(row, tokenizer, rng, with_answers=with_answers)
            token_ids = _token_ids(asked.text, tokenizer)
            answer = len(_token_ids(asked.answer, tokenizer)) if asked.answer else None
        if 0 < len(token_ids) <= max_tokens:
            prompts.append(Prompt(_source(row), tuple(token_ids), asked.text, asked.messages, answer))
    return _some(prompts, path, max_tokens)


def load_conversations(path: Path, tokenizer: PreTrainedTokenizerBase, *, count: int, max_tokens: int, seed: int) -> list[Prompt]:
    """The prompts of ``count`` conversations, one after another: what a client sends for each assistant turn of a dialogue in turn.

    What was said before is the file's own, whatever a model answers. Lines are as in ``load_prompts``, and what is no dialogue is a
    conversation of one prompt. Prompts of more than ``max_tokens`` tokens, the last ones of long dialogues, are left out.

    Raises PromptError as ``load_prompts`` does.
    """
    rng, prompts, held = random.Random(seed), list[Prompt](), 0
    for place, row in _drawn(path, max_tokens, rng):
        if held == count:
            break
        with _problems(place):
            cuts: list[int | None] = [*_cuts(row)] or [None]
            asked = [(each, tuple(_token_ids(each.text, tokenizer))) for each in (_asked(row, tokenizer, rng, cut) for cut in cuts)]
        fitting = [(each, token_ids) for each, token_ids in asked if 0 < len(token_ids) <= max_tokens]
        held += bool(fitting)
        prompts += (Prompt(_source(row), ids, each.text, each.messages, conversation=str(held)) for each, ids in fitting)
    return _some(prompts, path, max_tokens)


def _drawn(path: Path, max_tokens: int, rng: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """A file's lines in random order, each with what to call it."""
    if max_tokens < 1:
        raise PromptError("--max-tokens leaves no room for a prompt: a model holds both, so ask for fewer")
    lines = list(read_lines(path))
    rng.shuffle(lines)
    for number, row in lines:
        yield f"{path}, line {number}", row


@contextmanager
def _problems(place: str) -> Iterator[None]:
    """Raise PromptError for a line that cannot be rendered."""
    try:
        yield
    except UnicodeEncodeError as error:  # JSON can escape half a character, which tokenizers do not take
        raise PromptError(f"{place}: half a surrogate pair: {error}") from error
    except Exception as error:  # templates are programs: they raise whatever they like
        raise PromptError(f"{place}: not a dialogue, a question or a prompt ({error!r})") from error


def _some(prompts: list[Prompt], path: Path, max_tokens: int) -> list[Prompt]:
    if not prompts:
        raise PromptError(f"{path} holds no prompt of at most {max_tokens} tokens")
    return prompts


def _source(row: dict[str, Any]) -> str:
    return str(row.get("source", row.get("category", "prompt")))


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file, plain or gzipped, with their line numbers; raises PromptError."""
    opener, number = gzip.open if path.suffix == ".gz" else open, 0
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _object(line)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read {path}{f' after line {number}' if number else ''}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{path} is not JSONL, line {number}: {error}") from error


def _object(line: str) -> dict[str, Any]:
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError(f"an object is wanted, not {line.strip()[:40]}")
    return value


def _token_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    text.encode()
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
    return ids


def _cuts(row: dict[str, Any]) -> list[int]:
    """Before which of a dialogue's messages something is asked: its assistant's, but for a first one."""
    if "prompt" in row or "turns" in row:
        return []
    return [index for index, message in enumerate(row["messages"]) if message["role"] == "assistant" and index]


def _asked(
    row: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    rng: random.Random,
    cut: int | None = None,
    *,
    with_answers: bool = False,
) -> _Asked:
    """What a line asks; of a dialogue all before its message ``cut``, or one that is drawn."""
    if "prompt" in row:
        text = _text(row["prompt"])
        return _Asked(text, ({"role": "user", "content": text},), _reference(row) if with_answers else None)
    if "turns" in row:
        messages: list[dict[str, Any]] = [{"role": "user", "content": _text(row["turns"][0])}]
    else:
        if cut is None and (cuts := _cuts(row)):
            cut = rng.choice(cuts)
        row = row | {"messages": [_with_text(message) for message in row["messages"]]}
        messages = row["messages"][:cut]
    tools = row.get("tools")
    text = str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True))
    if not with_answers:
        answer = None
    elif cut is None:
        answer = _reference(row)
    else:
        whole = str(tokenizer.apply_chat_template(row["messages"][: cut + 1], tools=tools, tokenize=False))
        answer = whole.removeprefix(text).rstrip() if whole.startswith(text) else row["messages"][cut].get("content")
    return _Asked(text, tuple(messages), answer)


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content may come in parts, which are joined as the server does; templates would write their Python."""
    content = message.get("content")
    return message | {"content": "\n".join(_text(part["text"]) for part in content)} if isinstance(content, list) else message


def _text(value: Any) -> str:
    """Of a column that must be one: None would be asked as the word."""
    if not isinstance(value, str):
        raise TypeError(f"a text is wanted, not {str(value)[:40]}")
    return value


def _reference(row: dict[str, Any]) -> str | None:
    told = row.get("reference")
    return told[0] if isinstance(told, list) and told else told if isinstance(told, str) else None
