"""`moaserve bench peers`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from app.commands import loading, options

COMPARED = "What is compared"


def peers(
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="ours-plain, transformers, transformers-compiled, transformers-lookup, transformers-assisted, llama.cpp "
            "or llama.cpp-lookup. Give it again for more. (default: all but transformers-compiled, as far as they are there)",
            rich_help_panel=COMPARED,
        ),
    ] = None,
    independent: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder of a small model that drafts in transformers' assisted generation.",
            rich_help_panel=COMPARED,
        ),
    ] = None,
    lookup_tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Tokens that the peers' prompt lookup drafts at once. Give it again for more. (default: 2 and 10)",
            rich_help_panel=COMPARED,
        ),
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Prompts asked at once. Give it again for more. (default: 1 and 8)", rich_help_panel=COMPARED),
    ] = None,
    prompts: options.Prompts = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="How many of them.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is asked.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens generated per prompt.")] = 128,
    max_prompt_tokens: options.MaxPromptTokens = 1024,
    seed: Annotated[int, typer.Option(help="Which prompts are drawn.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results.json and a picture.", callback=options.writable_folder)
    ] = None,
    model: options.Model = None,
    drafter: options.Drafter = None,
    dtype: options.DType = None,
    num_threads: options.NumThreads = None,
    compile: options.Compile = None,
) -> None:
    """Our server against transformers' generate and llama.cpp: same weights, type, threads and prompts, in one run.

    All ways are started once and take turns on the CPU, prompt by prompt, greedily, with equally many threads. A ratio is the
    median over prompts (over groups of prompts, where more than one is asked at once). Ends with exit code 1 when a way fails, and
    after Ctrl-C, with figures of what was asked before.

    For example:

      moaserve bench peers --independent runs/independent --out results

      moaserve bench peers --peer transformers --peer llama.cpp --concurrency 1
    """
    levels = list(dict.fromkeys(concurrency or [1, 8]))
    if max(levels) > num_prompts:
        options.fail(f"--concurrency {max(levels)}: more at once than --num-prompts {num_prompts}", code=2)
    settings = options.load_settings(model=model, drafter=drafter, dtype=dtype, num_threads=num_threads, compile=compile)
    from benchmarks.peers.ways import PeerError, choose

    try:
        specs, notes = choose(
            peer,
            lookups=lookup_tokens or [2, 10],
            independent=independent,
            installed=lambda module: importlib.util.find_spec(module) is not None,
        )
    except PeerError as error:
        options.fail(str(error), code=2)
    for note in notes:
        typer.echo(note, err=True)
    import asyncio

    from benchmarks.network.processes import ProcessError
    from benchmarks.peers import measuring, report, running, servers
    from benchmarks.prompts import BUNDLED_PROMPTS, load_prompts

    with loading.clear_errors():
        tokenizer = loading.load_tokenizer(settings.model)
        limit = min(max_prompt_tokens, loading.positions(settings.model) - max_tokens)
        selected = load_prompts(prompts or BUNDLED_PROMPTS, tokenizer, count=num_prompts, max_tokens=limit, seed=seed)
    if max(levels) > len(selected):
        options.fail(f"--concurrency {max(levels)}: there are {len(selected)} prompts of at most {limit} tokens")
    threads = settings.num_threads or running.default_threads()
    plan = running.Plan(
        ours=servers.Ours(settings.model, settings.drafter, settings.dtype, settings.compile, threads),
        specs=specs,
        prompts=selected,
        tokenizer=tokenizer,
        max_tokens=max_tokens,
        concurrency=levels,
        independent=independent,
    )
    results, stage = measuring.Results(), running.Stage()

    async def run() -> None:
        nonlocal stage
        async with running.opened(plan, lambda line: typer.echo(line, err=True)) as stage:
            length = measuring.asked(stage.ways, selected, levels, rounds)
            with typer.progressbar(length=length, label="asking", show_pos=True, file=typer.get_text_stream("stderr")) as bar:
                await measuring.measure(
                    stage.ways, selected, results, concurrency=levels, rounds=rounds, progress=lambda: bar.update(1)
                )

    with loading.clear_errors():
        try:
            asyncio.run(run())
        except ModuleNotFoundError as error:
            if error.name != "gguf":
                raise
            options.fail(
                "no gguf, without which llama.cpp cannot be given the model: pip install gguf, or leave it out with --peer"
            )
        except (ProcessError, PeerError) as error:
            options.fail(str(error))
        except KeyboardInterrupt:
            results.failures.append("it was interrupted")
    measured, notes = stage.settings | {"rounds": rounds, "seed": seed}, [*notes, *stage.notes]
    if not results.runs:
        options.fail("nothing was measured: " + "; ".join(results.failures))
    report.print_results(results, measured, notes)
    if out is not None:
        try:
            for path in report.write(results, measured, notes, out):
                typer.echo(path)
        except ImportError:
            options.fail("no picture: pip install 'moaserve[eval]'; the figures are written")
    raise typer.Exit(1 if results.failures else 0)
