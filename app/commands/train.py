"""`moaserve train`: the trainer, then a measurement of what it made."""

from __future__ import annotations

import functools
from typing import Any

import typer

from app.commands import loading
from training.command import train_command

_PROMPTS, _MAX_TOKENS, _MAX_PROMPT_TOKENS = 32, 128, 768


@functools.wraps(train_command)
def train(**arguments: Any) -> None:
    """Train, then decode held-out prompts with the new drafter and print its acceptance length."""
    train_command(**arguments)
    from training import processes  # needs what a server does without, of which the command before has told

    if not processes.is_main():
        return
    target, out = arguments["target"], str(arguments["out"])
    if arguments["activations"] is not None:
        typer.echo(f"not evaluated, as the target is not there: moaserve eval --model {target} --drafter {out}")
        return
    _evaluate(target, out, arguments["valid"])


def _evaluate(target: str, drafter: str, valid: str | None) -> None:
    from pathlib import Path

    from benchmarks.acceptance import measure_acceptance
    from benchmarks.prompts import BUNDLED_PROMPTS, load_prompts
    from speculative.config import EngineConfig

    path = Path(valid) if valid is not None and Path(valid).is_file() else BUNDLED_PROMPTS
    with loading.clear_errors("the drafter is saved, but could not be evaluated: "):
        # As `moaserve eval` does: lookup and a policy that draws small trees would say little about the drafter.
        alone = EngineConfig(
            target, drafter, max_num_seqs=1, prefix_cache_tokens=0, draft_policy="fixed", draft_lookup=0, compile="off"
        )
        engine, tokenizer = loading.load_engine(alone)
        longest = min(_MAX_TOKENS, engine.info.max_model_len // 2)
        limit = min(_MAX_PROMPT_TOKENS, engine.info.max_model_len - longest)
        prompts = load_prompts(path, tokenizer, count=_PROMPTS, max_tokens=limit, seed=0)
    with typer.progressbar(length=len(prompts), label="evaluating", show_pos=True) as bar:
        acceptance = measure_acceptance(engine, prompts, max_tokens=longest, progress=lambda: bar.update(1))
    typer.echo(f"greedy, {len(prompts)} prompts of {path.name}, by the drafter alone: {acceptance.line()}")
