"""Chats -> token ids with a response mask, tokenised once."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from training.corpus import Corpus, Row, kept, store, stored
from training.errors import DataError

FORMAT = 1
"""Part of the cache key: raise it when what is stored changes."""

ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation and where it stands, for messages: ``source`` is ``file:line`` or ``dataset row``."""

    source: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


def load_corpus(name: str, tokenizer: PreTrainedTokenizerBase, cache: Path, *, progress: bool = True) -> Corpus:
    """Tokenise a ``.jsonl``/``.jsonl.gz`` file or a ``datasets`` name (``owner/name`` or ``owner/name:split``).

    The result is kept in ``cache`` under the content's hash, so the next call with the same text, tokenizer and chat template
    reads it from there. Raises DataError naming file and line.
    """
    if tokenizer.chat_template is None:
        raise DataError("the target's tokenizer has no chat template: conversations cannot be rendered")
    if not tokenizer.is_fast:
        raise DataError("the target's tokenizer has no fast version, and only fast ones report character offsets")
    path = Path(name)
    if path.is_dir():
        raise DataError(f"{name}: is a folder; name a .jsonl or .jsonl.gz file in it")
    if path.exists():
        fingerprint, examples = _file_hash(path), read_jsonl(path)
    elif path.suffix in (".jsonl", ".gz", ".json") or name.startswith((".", "/", "~")):
        raise DataError(f"{name}: no such file")
    else:
        fingerprint, examples = _read_hub(name)
    key = _key(fingerprint, tokenizer)
    corpus = kept(cache / key, tell=progress)
    if corpus is None:
        rows, left_out = tokenize(examples, tokenizer, label=name, progress=progress)
        store(rows, cache / key, left_out=left_out)
        corpus = stored(cache / key)
    return corpus


def read_jsonl(path: Path) -> Iterator[Example]:
    """Conversations of a ``.jsonl`` or ``.jsonl.gz`` file; blank lines are passed over."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    source = f"{path}:{number}"
                    try:
                        row = json.loads(line)
                    except (ValueError, RecursionError) as error:
                        raise DataError(f"{source}: not JSON: {error}") from error
                    yield _example(row, source)
        except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read: {error}") from error


def tokenize(
    examples: Iterable[Example], tokenizer: PreTrainedTokenizerBase, *, label: str = "corpus", progress: bool = False
) -> tuple[list[Row], int]:
    """Every conversation in which an assistant speaks, and how many there are in which none does."""
    rows: list[Row] = []
    left_out = 0
    rest = iter(examples)
    with tqdm(desc=f"tokenise {Path(label).name}", unit=" conversations", disable=not progress) as bar:
        while chunk := list(islice(rest, ROWS_AT_ONCE)):
            rendered = [render(example, tokenizer) for example in chunk]
            encoded = tokenizer(
                [text for text, _ in rendered], add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
            for (_, spans), ids, offsets in zip(rendered, encoded["input_ids"], encoded["offset_mapping"], strict=True):
                mask = _inside(np.array([start for start, _ in offsets], dtype=np.int64), spans)
                if mask.any():
                    # Nothing after the last response is ever asked for.
                    length = int(np.flatnonzero(mask)[-1]) + 1
                    rows.append((np.array(ids[:length], dtype=np.int32), mask[:length]))
                else:
                    left_out += 1
            bar.update(len(chunk))
    if not rows:
        raise DataError(f"{label}: no conversation has an assistant turn")
    return rows, left_out


def render(example: Example, tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[tuple[int, int]]]:
    """A conversation's text and the character span of each assistant turn in it, end-of-turn token included.

    A turn begins where the rendering of what precedes it, generation prompt added, ends. Turns that the template shows otherwise
    when more follows (some drop earlier reasoning) are left out.
    """
    try:
        text = _rendered(tokenizer, example, len(example.messages), prompt=False)
        spans: list[tuple[int, int]] = []
        for index, message in enumerate(example.messages):
            if message["role"] == "assistant" and index > 0:
                prompt = _rendered(tokenizer, example, index, prompt=True)
                turn = _rendered(tokenizer, example, index + 1, prompt=False).rstrip()
                if text.startswith(turn) and turn.startswith(prompt):
                    spans.append((len(prompt), len(turn)))
    except DataError:
        raise
    except Exception as error:  # templates are programs: they raise whatever they like
        raise DataError(f"{example.source}: the chat template refuses this conversation: {error}") from error
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can escape half a character, which tokenizers do not take
        raise DataError(f"{example.source}: a text holds half a surrogate pair: {error}") from error
    return text, spans


def _rendered(tokenizer: PreTrainedTokenizerBase, example: Example, count: int, *, prompt: bool) -> str:
    text = tokenizer.apply_chat_template(
        example.messages[:count],
        tools=[*example.tools] if example.tools else None,
        add_generation_prompt=prompt,
        tokenize=False,
    )
    assert isinstance(text, str)
    return text


def _inside(starts: npt.NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Which tokens, by their first character, lie in one of the ascending, disjoint spans."""
    edges = np.array(spans, dtype=np.int64).reshape(-1)
    inside: npt.NDArray[np.bool_] = np.searchsorted(edges, starts, side="right") % 2 == 1
    return inside


def _example(row: Any, source: str) -> Example:
    if not isinstance(row, dict):
        raise DataError(f'{source}: expected an object with "messages", found {type(row).__name__}')
    messages, tools = row.get("messages"), row.get("tools")
    if not isinstance(messages, list) or not messages:
        raise DataError(f'{source}: "messages" must be a non-empty list')
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f'{source}: messages[{index}] must be an object with a "role"')
        if not isinstance(message.get("content"), str | None):
            raise DataError(f"{source}: messages[{index}].content must be text or null")
    if tools is not None and not isinstance(tools, list):
        raise DataError(f'{source}: "tools" must be a list')
    return Example(source, messages, tools or None)


def _read_hub(name: str) -> tuple[str, Iterator[Example]]:
    """Fingerprint and conversations of a ``datasets`` name with a ``messages`` column."""
    import datasets  # slow to import, and only hub data needs it

    path, _, split = name.partition(":")
    try:
        dataset = datasets.load_dataset(path, split=split or "train")
    except Exception as error:
        raise DataError(f"{name}: neither a file nor a dataset that loads: {error}") from error
    if "messages" not in dataset.column_names:
        raise DataError(f'{name}: no "messages" column; it has {", ".join(dataset.column_names)}')
    return str(dataset._fingerprint), (_example(row, f"{name} row {number}") for number, row in enumerate(dataset))


def _file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    return digest.hexdigest()


def _key(fingerprint: str, tokenizer: PreTrainedTokenizerBase) -> str:
    parts = (str(FORMAT), fingerprint, json.dumps(tokenizer.chat_template), tokenizer.backend_tokenizer.to_str())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
