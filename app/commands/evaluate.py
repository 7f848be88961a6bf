"""`moaserve eval`: drafters side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.commands import options

if TYPE_CHECKING:
    from benchmarks.evaluation import Case, Figures


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
    out: Annotated[Path | None, typer.Option(help="Folder for results.json and the plots.")] = None,
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

    For example: moaserve eval --drafter ours=auto --drafter ngram --prompts test.jsonl.gz --out results
    """
    names = dict(_named(each) for each in drafter)
    if len(names) < len(drafter):
        options.fail("--drafter: two have the same name; write NAME=FOLDER", code=2)
    wanted = shape or ["tree", "chain"]
    for each in wanted:
        if each not in ("tree", "chain"):
            options.fail(f"--shape: tree or chain, not {each!r}", code=2)
    if "none" in names.values():
        options.fail("--drafter none: plain decoding is measured beside every drafter anyway", code=2)
    settings = options.load_settings(
        model=model,
        dtype=dtype,
        device=device,
        max_num_seqs=1,
        num_threads=num_threads,
        compile=compile,
        draft_depth=draft_depth,
        draft_breadth=draft_breadth,
        draft_nodes=draft_nodes,
        draft_min_reach=draft_min_reach,
        draft_temperature=draft_temperature,
        draft_lookup=0,
        draft_window=draft_window,
    )
    from benchmarks import evaluation as measuring
    from benchmarks.machine import decoding_settings
    from benchmarks.prompts import BUNDLED_PROMPTS, PromptError, load_prompts
    from models.errors import CheckpointError
    from models.loader import load_tokenizer, resolve_target
    from speculative.errors import EngineError
    from speculative.loading import load_engine

    config = settings.engine_config()
    configs = {name: replace(config, drafter=each) for name, each in names.items()}
    temperatures = temperature or [0.0, 1.0]
    try:
        tokenizer = load_tokenizer(resolve_target(config.model))
        if tokenizer is None:
            options.fail(f"--model {config.model}: no tokenizer, so prompts cannot be encoded")
        path = prompts or BUNDLED_PROMPTS
        selected = load_prompts(path, tokenizer, count=num_prompts, max_tokens=max_prompt_tokens, seed=seed)
        total = len(configs) * len(wanted) * len(temperatures) * len(selected)
        with typer.progressbar(length=total, label="decoding", show_pos=True) as bar:
            runs = measuring.evaluate(
                load_engine,
                configs,
                selected,
                shape_names=wanted,
                temperatures=temperatures,
                max_tokens=max_tokens,
                seed=seed,
                progress=lambda: bar.update(1),
            )
    except (EngineError, CheckpointError, PromptError) as error:
        options.fail(str(error))
    results = {case: measuring.by_source(each) for case, each in runs.items()}
    _print(results)
    if out is None:
        return
    described = {
        **decoding_settings(config),
        "drafters": names,
        "dtype": config.dtype,
        "compile": config.compile,
        "max_tokens": max_tokens,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(measuring.to_json(results, described) + "\n", encoding="utf-8")
    typer.echo(out / "results.json")
    try:
        from benchmarks.plots import draw
    except ImportError:
        options.fail("no plots: pip install 'moaserve[eval]'; the figures are written")
    for picture in draw(results, out, prompts=f"{len(selected)} prompts of {path.name}, at most {max_tokens} tokens each"):
        typer.echo(picture)


def _named(drafter: str) -> tuple[str, str]:
    name, separator, value = drafter.partition("=")
    return (name, value) if separator else (Path(drafter).name or drafter, drafter)


def _print(results: dict[Case, dict[str, Figures]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from benchmarks.evaluation import ALL

    console = Console()
    for sampling in dict.fromkeys(case.sampling for case in results):
        table = Table(title=f"{sampling}; speeds are over plain decoding, draft cost is in its steps")
        for column in ("drafter", "source", "τ (95%)", "decoding", "end to end", "tokens/s", "passes/token", "draft cost"):
            table.add_column(column, justify="left" if column in ("drafter", "source") else "right")
        for case, sources in results.items():
            if case.sampling != sampling:
                continue
            for source, each in sources.items():
                table.add_row(
                    f"{case.drafter}, {case.shape}",
                    source,
                    f"{each.tau:.2f} ({each.tau_low:.2f}–{each.tau_high:.2f})",
                    f"{each.decode_ratio:.2f}x",
                    f"{each.end_to_end:.2f}x",
                    f"{each.tokens_per_second:.0f}",
                    f"{each.passes_per_token:.2f}",
                    f"{each.draft_cost:.2f}",
                )
            table.add_section()
        console.print(table)
    console.print("accepted at depth 1, 2, …, all sources:")
    for case, sources in results.items():
        shares = " ".join(f"{share:.0%}" for share in sources[ALL].by_depth)
        console.print(f"  {case.drafter}, {case.shape}, {case.sampling}: {shares}")
