"""A byte-level BPE tokenizer -> what a GGUF file says of it, so that llama.cpp splits texts into the same tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from models.errors import CheckpointError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_BYTES, _GPT2, _DIGITS = "bytes", "gpt-2's pattern", "single digits"

PRE_TOKENIZERS: dict[tuple[tuple[str, ...], bool], str] = {
    ((_CONTRACTIONS + _WORD + r"|\p{N}{1,3}" + _REST, _BYTES), True): "llama-bpe",
    ((_CONTRACTIONS + _WORD + r"|\p{N}{1,3}" + _REST, _BYTES), False): "dbrx",
    ((_CONTRACTIONS + _WORD + r"|\p{N}" + _REST, _BYTES), False): "qwen2",
    ((_GPT2, _BYTES), False): "gpt-2",
    ((_DIGITS, _GPT2, _BYTES), False): "smollm",
}
"""llama.cpp's name of a pre-tokenizer, by its steps and by whether whole words are looked up before merges.

Those whose pattern llama.cpp only comes near to (tekken, gpt-4o) are not among them. Source: ``llm_tokenizer_bpe`` and
``llama_vocab::impl::load`` in its ``src/llama-vocab.cpp``.
"""

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""``llama_token_type`` of llama.cpp: from a text, special, added but not special, and stands for nothing."""

MOST_ENDS = 3
"""End tokens that a GGUF file can name: end of sequence, of a turn, of a message."""


@dataclass(frozen=True, slots=True)
class GGUFVocabulary:
    """Tokens by id with their types, merges in order, and which tokens begin and end texts.

    ``ends`` are the tokens that end a text, the tokenizer's own first; ``adds_bos`` and ``adds_eos`` tell what is put around
    every text.
    """

    pre_tokenizer: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    bos: int | None
    ends: list[int]
    adds_bos: bool
    adds_eos: bool
    chat_template: str | None


def read_vocabulary(tokenizer: PreTrainedTokenizerBase, size: int, ends: frozenset[int]) -> GGUFVocabulary:
    """The tokenizer of a model with ``size`` tokens that ``ends`` end; raises CheckpointError where llama.cpp has not the like."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise CheckpointError("the tokenizer has no tokenizer.json, of which alone GGUF files can be made")
    whole: dict[str, Any] = json.loads(backend.to_str())
    model = whole["model"]
    pre_tokenizer = _pre_tokenizer(whole, model)
    tokens, types = _tokens(model["vocab"], whole["added_tokens"], size)
    adds_bos, adds_eos = _put_around(tokenizer)
    template = tokenizer.chat_template
    return GGUFVocabulary(
        pre_tokenizer=pre_tokenizer,
        tokens=tokens,
        types=types,
        merges=[merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        bos=_one(tokenizer.bos_token_id),
        ends=_ends(_one(tokenizer.eos_token_id), ends),
        adds_bos=adds_bos,
        adds_eos=adds_eos,
        chat_template=template.get("default") if isinstance(template, dict) else template,
    )


def _pre_tokenizer(whole: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """llama.cpp's name for how texts are cut before merges."""
    if model["type"] != "BPE" or model.get("byte_fallback") or model.get("continuing_subword_prefix") or model.get("dropout"):
        kind = "BPE that is not byte-level" if model["type"] == "BPE" else model["type"]
        raise CheckpointError(f"the tokenizer is {kind}: GGUF files can be made of byte-level BPE alone")
    normalizer = whole.get("normalizer")
    if normalizer is not None and normalizer["type"] != "NFC":  # llama.cpp takes NFC's work for done, as its own exporter does
        raise CheckpointError(f"the tokenizer changes texts first ({normalizer['type']}), which llama.cpp would not")
    steps = tuple(_steps(whole.get("pre_tokenizer")))
    name = PRE_TOKENIZERS.get((steps, bool(model.get("ignore_merges"))))
    if name is None:
        merges = "whole words before merges" if model.get("ignore_merges") else "merges alone"
        known = ", ".join(sorted(PRE_TOKENIZERS.values()))
        raise CheckpointError(
            "llama.cpp has no pre-tokenizer that splits texts as this tokenizer does "
            f"({' → '.join(steps) or 'not at all'}; {merges}); those that can be exported split as llama.cpp's {known}"
        )
    return name


def _steps(step: Mapping[str, Any] | None) -> list[str]:
    """A pre-tokenizer's steps in words, patterns as they are."""
    if step is None:
        return []
    kind = step["type"]
    if kind == "Sequence":
        return [each for part in step["pretokenizers"] for each in _steps(part)]
    if kind == "Split" and step["behavior"] == "Isolated" and not step["invert"] and "Regex" in step["pattern"]:
        return [step["pattern"]["Regex"]]
    if kind == "Digits" and step["individual_digits"]:
        return [_DIGITS]
    if kind == "ByteLevel" and not step["add_prefix_space"]:
        return [_GPT2, _BYTES] if step["use_regex"] else [_BYTES]
    return [json.dumps(step)]


def _tokens(vocabulary: Mapping[str, int], added: list[dict[str, Any]], size: int) -> tuple[list[str], list[int]]:
    names = {number: name for name, number in vocabulary.items()} | {each["id"]: each["content"] for each in added}
    if max(names) >= size:
        raise CheckpointError(f"the tokenizer has token {max(names)}, the model has {size} tokens")
    for each in added:
        if each["lstrip"] or each["rstrip"] or each["single_word"]:
            raise CheckpointError(
                f"token {each['content']!r} takes spaces around it with it (lstrip, rstrip, single_word): llama.cpp would not"
            )
    kinds = {each["id"]: CONTROL if each["special"] else USER_DEFINED for each in added}
    tokens = [names.get(number, f"[PAD{number}]") for number in range(size)]
    if len(set(tokens)) < size:
        raise CheckpointError("two tokens of the tokenizer have the same text, which llama.cpp cannot tell apart")
    return tokens, [kinds.get(number, NORMAL) if number in names else UNUSED for number in range(size)]


def _put_around(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool]:
    """Whether a token that begins texts is put before, and one that ends them behind."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    around = tokenizer("a")["input_ids"]
    first = around[:1] == [tokenizer.bos_token_id] and around[:1] != bare[:1]
    last = around[-1:] == [tokenizer.eos_token_id] and around[-1:] != bare[-1:]
    if around != [*around[:first], *bare, *around[len(around) - last :]]:
        raise CheckpointError(f"the tokenizer puts tokens around texts ({around} for 'a') that llama.cpp would not")
    return first, last


def _ends(own: int | None, ends: frozenset[int]) -> list[int]:
    ordered = sorted(ends, key=lambda each: (each != own, each)) or ([] if own is None else [own])
    if len(ordered) > MOST_ENDS:
        raise CheckpointError(f"the model has {len(ordered)} tokens that end a text; a GGUF file can name {MOST_ENDS}")
    return ordered


def _one(number: int | list[int] | None) -> int | None:
    return number[0] if isinstance(number, list) else number
