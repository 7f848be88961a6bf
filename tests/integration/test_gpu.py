"""On a GPU: recorded graphs change no text."""

from __future__ import annotations

import pytest
import torch

from speculative.config import EngineConfig
from speculative.loading import load_engine
from speculative.request import Request
from tests.speculative.conftest import DRAFT, N0, request, run, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def crowd() -> list[Request]:
    return [
        request("a", [5, 9, 23, 41, 7, 9, 23], max_tokens=60, temperature=0.0),
        request("b", [11, 3, 3, 60], max_tokens=20, temperature=0.8, seed=3),
        request("c", [8] * 20, max_tokens=40, temperature=1.0, seed=4, top_p=0.9, top_k=30),
    ]


@pytest.mark.parametrize("slots", [1, 3])
def test_texts_are_those_of_plain_decoding(slots: int) -> None:
    texts = []
    for drafter, compile in (("none", "off"), ("none", "auto"), ("moa", "off"), ("moa", "auto")):
        settings = {"max_model_len": 128, "max_num_seqs": slots, "compile": compile, **DRAFT}
        drafting = str(N0 / "drafter") if drafter == "moa" else drafter
        engine = load_engine(
            EngineConfig(model=str(N0 / "target"), drafter=drafting, dtype="float32", device="cuda", **settings)  # type: ignore[arg-type]
        )
        assert (engine.tree_pass is not None) == (compile == "auto")
        texts.append(tokens(run(engine, crowd())))
    assert texts[1:] == [texts[0]] * 3
