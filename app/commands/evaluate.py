"""`moaserve eval`: drafters side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from app.commands import loading, options, tables
from speculative.config import MEMORY_FORMATS, MemoryFormat


def evaluate(
    drafter: Annotated[
        list[str],
        typer.Option(
            help="A drafter, as in serve, optionally with a name for tables: NAME=FOLDER. Give it again for each further one.",
        ),
    ],
    prompts: options.Prompts = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="How many of them.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens generated per prompt.")] = 128,
    max_prompt_tokens: options.MaxPromptTokens = 1024,
    seed: Annotated[int, typer.Option(help="Which prompts are drawn; also the sampling seed.")] = 0,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0.0, help="0 is greedy. Give it again for more. (default: 0 and 1)")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="tree (as configured) or chain (one candidate at each depth). Give it again for both. (default: both)"),
    ] = None,
    memory_format: Annotated[
        list[str] | None,
        typer.Option(
            help="Draft from memory as it would come over a network: int8, int4 or bfloat16; none: as it is. Give it again for "
            "more. (default: none)"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results.json and the plots.", callback=options.writable_folder)
    ] = None,
    model: options.Model = None,
    dtype: options.DType = None,
    device: options.Device = None,
    num_threads: options.NumThreads = None,
    compile: options.Compile = None,
    draft_depth: options.DraftDepth = None,
    draft_breadth: options.DraftBreadth = None,
    draft_nodes: options.DraftNodes = None,
    draft_min_reach: options.DraftMinReach = None,
    draft_temperature: options.DraftTemperature = None,
    draft_window: options.DraftWindow = None,
) -> None:
    """Compare drafters on the same prompts: acceptance, speed over plain decoding and what drafting costs, by source.

    Each prompt is decoded with and without speculation, the two taking turns. Drafters are compared by themselves, without lookup.
    Where it is stopped, or a drafter cannot be loaded, there are figures of what was done before.

    For example: moaserve eval --drafter ours=auto --drafter ngram --prompts test.jsonl.gz --out results
    """
    names = options.named(drafter)
    wanted = shape or ["tree", "chain"]
    for each in wanted:
        if each not in ("tree", "chain"):
            options.fail(f"--shape: tree or chain, not {each!r}", code=2)
    known: dict[str, MemoryFormat | None] = {**{each: each for each in MEMORY_FORMATS}, "none": None}
    formats = list(dict.fromkeys(memory_format or ["none"]))
    for each in formats:
        if each not in known:
            options.fail(f"--memory-format: one of {', '.join(known)}, not {each!r}", code=2)
    if "none" in names.values():
        options.fail("--drafter none: plain decoding is measured beside every drafter anyway", code=2)
    # Of the drafters, each gets a configuration of its own.
    config = options.engine_config(locals() | {"drafter": None, "draft_lookup": 0, "draft_policy": "fixed", "max_num_seqs": 1})
    from benchmarks import evaluation as measuring
    from benchmarks.machine import decoding_settings, write_text
    from benchmarks.prompts import BUNDLED_PROMPTS, load_prompts
    from models.errors import CheckpointError
    from speculative.errors import EngineError
    from speculative.loading import load_engine

    configs = {name: replace(config, drafter=each) for name, each in names.items()}
    temperatures = temperature or [0.0, 1.0]
    with loading.clear_errors():
        tokenizer = loading.load_tokenizer(config.model)
        path, limit = prompts or BUNDLED_PROMPTS, min(max_prompt_tokens, loading.positions(config.model) - max_tokens)
        selected = load_prompts(path, tokenizer, count=num_prompts, max_tokens=limit, seed=seed)
    total = len(formats) * len(configs) * len(wanted) * len(temperatures) * len(selected)
    runs: dict[measuring.Case, list[measuring.Run]] = {}
    load, dtypes = loading.noting_dtypes(load_engine)
    stopped = None
    with typer.progressbar(length=total, label="decoding", show_pos=True) as bar:
        try:
            for case, done in measuring.evaluate(
                load,
                configs,
                selected,
                shape_names=wanted,
                temperatures=temperatures,
                max_tokens=max_tokens,
                seed=seed,
                memory_formats=[known[each] for each in formats],
                progress=lambda: bar.update(1),
            ):
                runs[case] = done
        except (CheckpointError, EngineError) as error:  # of the last drafter, maybe, after hours of the others
            stopped = str(error)
        except KeyboardInterrupt:
            stopped = "it was interrupted"
    if stopped is not None and not runs:
        options.fail(stopped)
    results = {case: measuring.by_source(each) for case, each in runs.items()}
    tables.print_evaluation(results)
    if out is not None:
        described = {
            **decoding_settings(config),
            "drafters": names,
            "dtype": ", ".join(dtypes),
            "compile": config.compile,
            "max_tokens": max_tokens,
            "seed": seed,
            "memory_formats": formats,
        }
        write_text(measuring.to_json(results, described), out / "results.json")
        typer.echo(out / "results.json")
        try:
            from benchmarks.plots import draw
        except ImportError:
            options.fail("no plots: pip install 'moaserve[eval]'; the figures are written")
        for picture in draw(results, out, prompts=f"{len(selected)} prompts of {path.name}, at most {max_tokens} tokens each"):
            typer.echo(picture)
    if stopped is not None:
        options.fail(f"not everything was measured: {stopped}")
