"""What a measurement begins with: an engine or a tokenizer, and one clear line where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from app.commands import options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from speculative.config import EngineConfig
    from speculative.engine import Engine


@contextmanager
def clear_errors(before: str = "") -> Iterator[None]:
    """End the program where a model, a drafter or a file of prompts cannot be used, with ``before`` and what is wrong."""
    from benchmarks.prompts import PromptError
    from models.errors import CheckpointError
    from speculative.errors import EngineError

    try:
        yield
    except (CheckpointError, EngineError, PromptError) as error:
        options.fail(before + str(error))


def load_engine(config: EngineConfig) -> tuple[Engine, PreTrainedTokenizerBase]:
    """An engine and its tokenizer, without which the program ends; raises EngineError."""
    from speculative import loading

    engine = loading.load_engine(config)
    return engine, _needed(engine.tokenizer, config.model)


def noting_dtypes(load: Callable[[EngineConfig], Engine]) -> tuple[Callable[[EngineConfig], Engine], dict[str, None]]:
    """The same, and the types in which what was loaded by it computes, where "auto" was asked for too; in order."""
    dtypes: dict[str, None] = {}

    def noting(config: EngineConfig) -> Engine:
        engine = load(config)
        dtypes[engine.info.dtype] = None
        return engine

    return noting, dtypes


def positions(model: str) -> int:
    """How many tokens a model's prompts and answers may have together; raises CheckpointError."""
    from models import loader

    return loader.target_config(model).max_position_embeddings


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """A model's tokenizer, without which the program ends; raises CheckpointError."""
    from models import loader

    return _needed(loader.load_tokenizer(loader.resolve_target(model)), model)


def _needed(tokenizer: PreTrainedTokenizerBase | None, model: str) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        options.fail(f"--model {model}: no tokenizer, so prompts cannot be encoded")
    return tokenizer
