"""Engines of a tiny pair, compiled or not."""

from __future__ import annotations

from pathlib import Path

from speculative.config import EngineConfig
from speculative.engine import Engine
from speculative.loading import load_engine

FIXTURE = Path(__file__).parents[1] / "fixtures" / "llama-n0"


def load(compile_: str, **settings: object) -> Engine:
    return load_engine(
        EngineConfig(
            max_num_seqs=4,
            compile=compile_,  # type: ignore[arg-type]
            **{  # type: ignore[arg-type]
                "model": str(FIXTURE / "target"),
                "max_model_len": 128,
                "drafter": str(FIXTURE / "drafter"),
                "dtype": "float32",
                "draft_policy": "fixed",
                **settings,
            },
        )
    )
