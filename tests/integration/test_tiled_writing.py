"""Conversations written anew by the bundled target with the operator for its layers, against the same without it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models import tiled_decoder
from models.llama import CompiledGraph, Llama
from models.loader import eos_token_ids, load_target, resolve_target
from training.corpus import Corpus
from training.regenerate import Writing, regenerate

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("operators"),
]


def test_it_writes_what_the_target_says(monkeypatch: pytest.MonkeyPatch) -> None:
    target, tokenizer = load_target("bundled", dtype=torch.bfloat16)
    assert tokenizer is not None
    answer = [1] * 3  # to be written anew
    parts = []
    for number in range(12):
        message = {"role": "user", "content": f"A table for {number + 1} at {number} o'clock, please."}
        rendered = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        parts.append(tokenizer.encode(rendered, add_special_tokens=False))
    tokens = np.array([token for part in parts for token in part + answer], np.int32)
    response = np.array([mine for part in parts for mine in [False] * len(part) + [True] * len(answer)])
    corpus = Corpus(tokens, response, np.cumsum([0, *(len(part) + len(answer) for part in parts)], dtype=np.int64), key="test")
    writing = Writing(eos_token_ids(resolve_target("bundled")), 256, max_turn=48, slots=5)

    def written() -> set[tuple[int, ...]]:
        rows = regenerate(corpus, range(len(corpus)), target, writing, progress=False)
        return {tuple(ids.tolist()) for ids, _ in rows}

    made: list[Llama] = []
    make = tiled_decoder.tiled_decoder

    def counted(given: Llama) -> CompiledGraph:
        made.append(given)
        return make(given)

    monkeypatch.setattr(tiled_decoder, "tiled_decoder", counted)
    ours = written()
    assert made == [target] and target.compiled is None
    monkeypatch.setattr(tiled_decoder, "suits", lambda given: False)
    # In bfloat16 a near-tie falls the other way now and then.
    assert len(written() & ours) >= 9
