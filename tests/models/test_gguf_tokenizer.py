"""What a GGUF file says of a tokenizer, and which tokenizers are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from models.errors import CheckpointError
from models.gguf_tokenizer import NORMAL, UNUSED, read_vocabulary
from models.loader import BUNDLED, load_tokenizer

Change = Callable[[dict[str, Any]], None]


def bundled_tokenizer(folder: Path, change: Change = lambda whole: None) -> Path:
    """The bundled tokenizer, its tokenizer.json changed."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = json.loads((BUNDLED["target"] / "tokenizer.json").read_text("utf-8"))
    change(whole)
    (folder / "tokenizer.json").write_text(json.dumps(whole), "utf-8")
    shutil.copy(BUNDLED["target"] / "tokenizer_config.json", folder)
    return folder


def test_tokens_that_the_model_has_and_the_tokenizer_has_not_are_unused() -> None:
    tokenizer = load_tokenizer(BUNDLED["target"])
    assert tokenizer is not None
    vocabulary = read_vocabulary(tokenizer, 8200, frozenset([2]))
    assert vocabulary.tokens[8191:] == [vocabulary.tokens[8191], *(f"[PAD{number}]" for number in range(8192, 8200))]
    assert vocabulary.types[8191:] == [NORMAL] + [UNUSED] * 8
    with pytest.raises(CheckpointError, match="has token 8191, the model has 8000 tokens"):
        read_vocabulary(tokenizer, 8000, frozenset([2]))


@pytest.mark.parametrize(
    ("ends", "expected"), [(frozenset[int](), [2]), (frozenset([0, 2]), [2, 0]), (frozenset([4, 1, 2]), [2, 1, 4])]
)
def test_the_tokenizers_own_end_comes_first(ends: frozenset[int], expected: list[int]) -> None:
    tokenizer = load_tokenizer(BUNDLED["target"])
    assert tokenizer is not None and read_vocabulary(tokenizer, 8192, ends).ends == expected


def test_what_is_put_before_texts_is_told(tmp_path: Path) -> None:
    def begin(whole: dict[str, Any]) -> None:
        start = {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
        whole["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}})
        whole["post_processor"]["special_tokens"] = {"<|im_start|>": start}

    folder = bundled_tokenizer(tmp_path, begin)
    tokenizer = AutoTokenizer.from_pretrained(folder, bos_token="<|im_start|>")
    vocabulary = read_vocabulary(tokenizer, 8192, frozenset([2]))
    assert (vocabulary.bos, vocabulary.adds_bos, vocabulary.adds_eos) == (1, True, False)
    with pytest.raises(CheckpointError, match="puts tokens around texts"):
        read_vocabulary(AutoTokenizer.from_pretrained(folder), 8192, frozenset([2]))


def _pattern(whole: dict[str, Any]) -> None:
    whole["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\w+"


def _ignored_merges(whole: dict[str, Any]) -> None:
    whole["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    whole["model"]["ignore_merges"] = True


def _prefix_space(whole: dict[str, Any]) -> None:
    whole["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_pattern, r"llama.cpp has no pre-tokenizer that splits texts as this tokenizer does \(\\w\+ → bytes; merges alone\)"),
        (_ignored_merges, r"gpt-2's pattern → bytes; whole words before merges"),
        (_prefix_space, '"add_prefix_space": true'),
        (lambda whole: whole.update(pre_tokenizer=None), "not at all"),
        (lambda whole: whole["model"].update(byte_fallback=True), "BPE that is not byte-level"),
        (lambda whole: whole.update(normalizer={"type": "Lowercase"}), r"changes texts first \(Lowercase\)"),
        (lambda whole: whole["added_tokens"][3].update(lstrip=True), "'<tool_call>' takes spaces around it"),
    ],
)  # fmt: skip
def test_tokenizers_that_llama_cpp_has_not_the_like_of_are_refused(change: Change, message: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(bundled_tokenizer(tmp_path, change))
    assert tokenizer is not None
    with pytest.raises(CheckpointError, match=message):
        read_vocabulary(tokenizer, 8192, frozenset([2]))
