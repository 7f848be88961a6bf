"""Prompts to measure with: the bundled ones, or a JSONL file of dialogues, questions or plain prompts."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

BUNDLED_PROMPTS = Path(__file__).parent / "data" / "prompts.jsonl"


class PromptError(Exception):
    """A prompt file cannot be used; the message names file and line."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, tokenized, and where it comes from."""

    source: str
    token_ids: tuple[int, ...]


def load_prompts(path: Path, tokenizer: PreTrainedTokenizerBase, *, count: int, max_tokens: int, seed: int) -> list[Prompt]:
    """``count`` prompts of at most ``max_tokens`` tokens, drawn with ``seed``.

    A line holds ``{"messages": […], "tools": […]?}`` (cut before one of its assistant turns, drawn too), ``{"turns": […]}`` (the
    first is asked) or ``{"prompt": "…"}`` (continued as it stands).
    """
    lines = list(read_lines(path))
    rng = random.Random(seed)
    rng.shuffle(lines)
    prompts: list[Prompt] = []
    for number, row in lines:
        if len(prompts) == count:
            break
        try:
            text = _render(row, tokenizer, rng)
        except (KeyError, TypeError, AttributeError) as error:
            raise PromptError(f"{path}, line {number}: not a dialogue, a question or a prompt ({error!r})") from error
        token_ids = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        if 0 < len(token_ids) <= max_tokens:
            prompts.append(Prompt(str(row.get("source", row.get("category", "prompt"))), tuple(token_ids)))
    if not prompts:
        raise PromptError(f"{path} holds no prompt of at most {max_tokens} tokens")
    return prompts


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file, plain or gzipped, with their line numbers; raises PromptError."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, json.loads(line)
    except ValueError as error:
        raise PromptError(f"{path} is not JSONL: {error}") from error
    except OSError as error:
        raise PromptError(f"cannot read {path}: {error}") from error


def _render(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, rng: random.Random) -> str:
    if "prompt" in row:
        return str(row["prompt"])
    if "turns" in row:
        messages: list[dict[str, Any]] = [{"role": "user", "content": row["turns"][0]}]
    else:
        turns = [index for index, message in enumerate(row["messages"]) if message["role"] == "assistant" and index]
        messages = row["messages"][: rng.choice(turns)] if turns else row["messages"]
    return str(tokenizer.apply_chat_template(messages, tools=row.get("tools"), tokenize=False, add_generation_prompt=True))
