"""Chat corpora -> token ids with a response mask, tokenised once and kept on disk."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import tempfile
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

from training.errors import DataError
from training.needs import Activations

FORMAT = 1
"""Part of the cache key: raise it when what is stored changes."""

ROWS_AT_ONCE = 256

Row = tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]
"""Token ids and response mask of one conversation, each [S]."""


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation and where it stands, for messages: ``source`` is ``file:line`` or ``dataset row``."""

    source: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokenised conversations, end to end: number i is rows ``offsets[i]`` … ``offsets[i + 1]`` of the flat arrays.

    ``tokens`` int32 and ``response`` bool, both [total]; ``response`` is true on the tokens that an assistant wrote, the
    end-of-turn token included. ``key`` identifies text, tokenizer and template; ``activations`` are the target's where they were
    kept.
    """

    tokens: npt.NDArray[np.int32]
    response: npt.NDArray[np.bool_]
    offsets: npt.NDArray[np.int64]
    key: str
    activations: Activations | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self, max_length: int) -> npt.NDArray[np.int64]:
        """Tokens of each conversation after truncation [len]."""
        return np.minimum(np.diff(self.offsets), max_length)

    def usable(self, max_length: int) -> npt.NDArray[np.int64]:
        """Indices of the conversations in which some response is left to learn from after truncation."""
        ends = np.concatenate(([0], np.cumsum(self.response, dtype=np.int64)))
        starts = self.offsets[:-1]
        # A response token teaches the token after it, so one alone teaches nothing.
        return np.flatnonzero(ends[starts + self.lengths(max_length)] - ends[starts] >= 2)

    def frequent_response_tokens(self, count: int) -> npt.NDArray[np.int64]:
        """The ids of the ``count`` tokens that responses use most, the most frequent first."""
        counts = np.bincount(self.tokens[self.response])
        return np.argsort(-counts, kind="stable")[:count].astype(np.int64)

    def response_share(self, tokens: npt.NDArray[np.int64]) -> float:
        """How much of what responses say is said with these token ids, 0 to 1."""
        return float(np.isin(self.tokens[self.response], tokens).mean())

    def row(self, index: int, max_length: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Token ids and response mask of one conversation, each [S ≤ max_length]."""
        start = int(self.offsets[index])
        end = min(int(self.offsets[index + 1]), start + max_length)
        return self.tokens[start:end], self.response[start:end]


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
    folder = cache / key
    if not folder.exists():
        store(tokenize(examples, tokenizer, label=name, progress=progress), folder)
    return stored(folder)


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
) -> list[Row]:
    """Every conversation in which an assistant speaks."""
    rows: list[Row] = []
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
            bar.update(len(chunk))
    if not rows:
        raise DataError(f"{label}: no conversation has an assistant turn")
    return rows


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


def store_copy(corpus: Corpus, folder: Path) -> None:
    """Keep a corpus in another folder too, under its key."""
    rows = [corpus.row(index, 1 << 62) for index in range(len(corpus))]
    if not (folder / corpus.key).exists():
        store(rows, folder / corpus.key)


def stored(folder: Path) -> Corpus:
    """A corpus that ``store`` wrote; its folder's name is its key."""
    arrays = {part: np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("tokens", "response", "offsets")}
    return Corpus(**arrays, key=folder.name)


def store(rows: Sequence[Row], folder: Path) -> None:
    """Write the arrays beside their place and move them in whole, so that a cache entry is complete or absent.

    There may be no rows, as in one process's share.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        np.save(temporary / "tokens.npy", np.concatenate([np.empty(0, np.int32), *(ids for ids, _ in rows)]))
        np.save(temporary / "response.npy", np.concatenate([np.empty(0, np.bool_), *(mask for _, mask in rows)]))
        np.save(temporary / "offsets.npy", np.cumsum([0, *(len(ids) for ids, _ in rows)], dtype=np.int64))
        if not folder.exists():
            os.rename(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
