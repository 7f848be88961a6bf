"""`moaserve bench alone`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from app.commands import loading, options, tables


def alone(
    drafter: Annotated[
        list[str],
        typer.Option(help="A drafter's folder, or auto, optionally with a name: NAME=FOLDER. Give it again for each further one."),
    ],
    prompts: options.Prompts = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="How many of them.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=8, help="Most tokens of an answer.")] = 128,
    max_prompt_tokens: options.MaxPromptTokens = 1024,
    seed: Annotated[int, typer.Option(help="Which prompts are drawn.")] = 0,
    cut: Annotated[
        list[float] | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of an answer after which the target is gone. Give it again for more. (default: 0.25, 0.5, 0.75)",
        ),
    ] = None,
    json: options.ResultFile = None,
    model: options.Model = None,
    dtype: options.DType = None,
    num_threads: options.NumThreads = None,
    draft_window: options.DraftWindow = None,
) -> None:
    """What drafters write when the target is gone: an edge that is cut off goes on with its drafter alone.

    The target answers each prompt greedily. At each cut a drafter goes on, from what it knows of the text up to there, and its
    text is compared with the target's: leading tokens that are the same, similarity (tokens of matching stretches), whole rests,
    and whether tool calls are exactly the target's. After Ctrl-C there are figures of the drafters before.

    For example: moaserve bench alone --drafter ours=auto --drafter eagle=runs/eagle2 --prompts test.jsonl.gz
    """
    names = options.named(drafter)
    cuts = sorted(set(cut or (0.25, 0.5, 0.75)))
    config = options.engine_config(locals() | {"drafter": None, "max_num_seqs": 1, "compile": "off"})
    from benchmarks import alone as measuring
    from benchmarks.interrupting import until_interrupted
    from benchmarks.machine import decoding_settings, write_text
    from benchmarks.prompts import BUNDLED_PROMPTS, load_prompts
    from speculative import loading as engines

    # Texts are compared with nothing left over from other texts, and by drafters themselves.
    config = replace(config, prefix_cache_tokens=0, draft_policy="fixed", draft_lookup=0)
    configs = {name: replace(config, drafter=each) for name, each in names.items()}
    with loading.clear_errors():
        tokenizer = loading.load_tokenizer(config.model)
        path = prompts or BUNDLED_PROMPTS
        selected = load_prompts(path, tokenizer, count=num_prompts, max_tokens=max_prompt_tokens, seed=seed)
        load, dtypes = loading.noting_dtypes(engines.load_engine)
        results: dict[str, list[measuring.Continuation]] = {}
        with typer.progressbar(length=len(configs) * len(selected), label="writing", show_pos=True) as bar:
            measured = measuring.measure(load, configs, selected, cuts=cuts, max_tokens=max_tokens, progress=lambda: bar.update(1))
            with until_interrupted(lambda: results):
                for name, continuations in measured:
                    results[name] = continuations
    tables.print_alone(results)
    if json is not None:
        described = {
            **decoding_settings(config),
            "drafters": names,
            "dtype": ", ".join(dtypes),
            "max_tokens": max_tokens,
            "seed": seed,
        }
        write_text(measuring.to_json(results, described), json)
    options.fail_if_interrupted(len(results), len(configs), "drafters")
