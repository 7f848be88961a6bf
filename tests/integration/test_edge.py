"""The bundled pair's bundle drafts as the bundled drafter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.prompts import BUNDLED_PROMPTS, load_prompts
from models.edge_bundle import read_bundle
from speculative.config import EngineConfig
from speculative.edge_export import export_edge
from speculative.loading import load_engine
from speculative.request import Request, SamplingParams
from tests.speculative.edge import Beside, put_beside

pytestmark = pytest.mark.integration


def decoded(folder: Path, **options: Any) -> Beside:
    """What both drafters have proposed for eight prompts, four at a time, half of them sampled."""
    export_edge("bundled", "bundled", folder, **options)
    engine = load_engine(
        EngineConfig(
            dtype="float32",
            compile="off",
            num_threads=1,
            max_num_seqs=4,
            draft_policy="fixed",
            prefix_cache_tokens=0,
            draft_lookup=0,
        )
    )
    both = put_beside(engine, read_bundle(folder, dtype=torch.float32))
    assert engine.tokenizer is not None
    for number, prompt in enumerate(load_prompts(BUNDLED_PROMPTS, engine.tokenizer, count=8, max_tokens=400, seed=0)):
        params = SamplingParams(max_tokens=64, temperature=number % 2 * 0.7, seed=number, ignore_eos=True)
        engine.add(Request(str(number), tuple(prompt.token_ids), params))
    while engine.has_work:
        engine.step()
    return both


def test_trees_are_the_same(tmp_path: Path) -> None:
    decoded(tmp_path, dtype="float32").assert_same_trees()


def test_with_int8_weights_the_likeliest_tokens_are_nearly_always_the_same(tmp_path: Path) -> None:
    trees = decoded(tmp_path, quantization="int8").trees
    same = torch.cat([whole.tokens[:, 0] == edge.tokens[:, 0] for whole, edge in trees])
    assert len(same) > 50 and same.float().mean() > 0.9
