"""`moaserve bench`: measurements, each a sub-command."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import httpx
import typer

from app.commands import options

if TYPE_CHECKING:
    from benchmarks.offline import OfflineResult

bench = typer.Typer(name="bench", help="Measure speed and acceptance on this machine.", no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    """Measure speed and acceptance on this machine."""


@bench.command()
def offline(
    prompts: options.Prompts = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="How many of them.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens generated per prompt.")] = 128,
    max_prompt_tokens: options.MaxPromptTokens = 1024,
    seed: Annotated[int, typer.Option(help="Which prompts are drawn.")] = 0,
    transformers: Annotated[
        bool, typer.Option("--transformers/--no-transformers", help="Also run transformers' generate, for comparison.")
    ] = True,
    json: Annotated[Path | None, typer.Option(help="Write all figures here as JSON.")] = None,
    model: options.Model = None,
    dtype: options.DType = None,
    device: options.Device = None,
    max_model_len: options.MaxModelLen = None,
    num_threads: options.NumThreads = None,
    compile: options.Compile = None,
    drafter: options.Drafter = None,
    draft_depth: options.DraftDepth = None,
    draft_breadth: options.DraftBreadth = None,
    draft_nodes: options.DraftNodes = None,
    draft_min_reach: options.DraftMinReach = None,
    draft_temperature: options.DraftTemperature = None,
    draft_lookup: options.DraftLookup = None,
    draft_window: options.DraftWindow = None,
) -> None:
    """Plain against speculative decoding and against transformers' generate: same prompts, same weights, one run.

    Every prompt is decoded greedily in each way in turn, one at a time, without HTTP. A ratio is the median over prompts.

    For example:

      moaserve bench offline

      moaserve bench offline --prompts my.jsonl --num-prompts 100 --json result.json
    """
    settings = options.load_settings(
        model=model,
        dtype=dtype,
        device=device,
        max_model_len=max_model_len,
        max_num_seqs=1,
        num_threads=num_threads,
        compile=compile,
        drafter=drafter,
        draft_depth=draft_depth,
        draft_breadth=draft_breadth,
        draft_nodes=draft_nodes,
        draft_min_reach=draft_min_reach,
        draft_temperature=draft_temperature,
        draft_lookup=draft_lookup,
        draft_window=draft_window,
    )
    from benchmarks import offline as measuring
    from benchmarks.decoding import load_transformers
    from benchmarks.prompts import BUNDLED_PROMPTS, PromptError, load_prompts
    from speculative.errors import EngineError
    from speculative.loading import load_engine

    config = settings.engine_config()
    try:
        engine = load_engine(config)
        if engine.tokenizer is None:
            options.fail(f"--model {config.model}: no tokenizer, so prompts cannot be encoded")
        limit = min(max_prompt_tokens, engine.info.max_model_len - max_tokens)
        selected = load_prompts(prompts or BUNDLED_PROMPTS, engine.tokenizer, count=num_prompts, max_tokens=limit, seed=seed)
    except (EngineError, PromptError) as error:
        options.fail(str(error))
    reference = load_transformers(config.model, engine.info.dtype, engine.info.device) if transformers else None
    gc.collect()
    gc.freeze()  # as the server does
    with typer.progressbar(length=len(selected), label="decoding", show_pos=True) as bar:
        result = measuring.run_offline(
            engine, config, selected, max_tokens=max_tokens, reference=reference, progress=lambda: bar.update(1)
        )
    _print(result)
    if json is not None:
        measuring.write_json(result, json)


@bench.command()
def lossless(
    base_url: Annotated[str, typer.Option(help="A running server; start it with --dtype float32.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str, typer.Option(help="The model that it serves: 'bundled', a folder or a hub id.")] = "bundled",
    prompts: options.Prompts = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="How many of them.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens generated per prompt.")] = 128,
    max_prompt_tokens: options.MaxPromptTokens = 1024,
    seed: Annotated[int, typer.Option(help="Which prompts are drawn; also the sampling seed.")] = 0,
) -> None:
    """Check a server's promise: the same text with speculation on and off, alone and in company, and as from transformers.

    Greedy text is compared with transformers' generate on the same weights in float32, sampled text with the same request sent
    with "speculative": false. Ends with exit code 1 when any text differs.

    For example, in two terminals:

      moaserve serve --dtype float32

      moaserve bench lossless
    """
    import asyncio

    from benchmarks import lossless as checking
    from benchmarks.decoding import load_transformers
    from benchmarks.prompts import BUNDLED_PROMPTS, PromptError, load_prompts
    from models.errors import CheckpointError
    from models.loader import load_tokenizer, resolve_target

    try:
        tokenizer = load_tokenizer(resolve_target(model))
        if tokenizer is None:
            options.fail(f"--model {model}: no tokenizer, so prompts cannot be encoded")
        selected = load_prompts(prompts or BUNDLED_PROMPTS, tokenizer, count=num_prompts, max_tokens=max_prompt_tokens, seed=seed)
    except (CheckpointError, PromptError) as error:
        options.fail(str(error))
    greedy = {"temperature": 0}
    sampled = [{"temperature": 0.3}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.3, "top_k": 40}]
    with typer.progressbar(length=len(selected) * (3 + 3 * len(sampled)), label="comparing") as bar:

        def texts(concurrency: int, **parameters: Any) -> list[str]:
            work = checking.server_texts(
                base_url, selected, concurrency=concurrency, progress=lambda: bar.update(1), max_tokens=max_tokens, **parameters
            )
            return asyncio.run(work)

        try:
            expected = checking.reference_texts(
                load_transformers(model, "float32", "cpu"), tokenizer, selected, max_tokens, lambda: bar.update(1)
            )
            results = [
                checking.compare(f"greedy, {streams} at a time, against transformers", texts(streams, **greedy), expected)
                for streams in (1, 8)
            ]
            for parameters in sampled:
                plain = texts(1, seed=seed, speculative=False, **parameters)
                for streams in (1, 8):
                    name = f"{parameters}, {streams} at a time, speculation on against off"
                    results.append(checking.compare(name, texts(streams, seed=seed, **parameters), plain))
        except httpx.HTTPError as error:
            options.fail(f"--base-url {base_url}: {error}")
    for result in results:
        typer.echo(result.line())
    raise typer.Exit(0 if all(result.ok for result in results) else 1)


@bench.command()
def answers(
    prompts: Annotated[
        Path, typer.Option(help='Held-out dialogues as JSONL, plain or gzipped: {"messages": […], "tools": […]?}.', exists=True)
    ],
    num_prompts: Annotated[int, typer.Option(min=1, help="How many questions of each kind.")] = 100,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens generated per question.")] = 256,
    seed: Annotated[int, typer.Option(help="Which dialogues are drawn.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write all figures here as JSON.")] = None,
    model: options.Model = None,
    drafter: options.Drafter = None,
    dtype: options.DType = None,
    device: options.Device = None,
    num_threads: options.NumThreads = None,
    compile: options.Compile = None,
    max_num_seqs: options.MaxNumSeqs = 16,
) -> None:
    """How often a target is right, greedily: its first tool call of a dialogue, the number in "The answer is …", small talk.

    A tool call is right when name and arguments are the dialogue's; a reply, when it is the same text.

    For example: moaserve bench answers --model runs/target --prompts test.jsonl.gz
    """
    settings = options.load_settings(
        model=model,
        drafter=drafter,
        dtype=dtype,
        device=device,
        num_threads=num_threads,
        compile=compile,
        max_num_seqs=max_num_seqs,
    )
    import json as encoding

    from benchmarks import answers as checking
    from benchmarks.machine import provenance
    from benchmarks.prompts import PromptError
    from speculative.errors import EngineError
    from speculative.loading import load_engine

    config = settings.engine_config()
    try:
        engine = load_engine(config)
        if engine.tokenizer is None:
            options.fail(f"--model {config.model}: no tokenizer, so prompts cannot be encoded")
        questions = checking.read_questions(
            prompts, engine.tokenizer, count=num_prompts, max_tokens=engine.info.max_model_len - max_tokens, seed=seed
        )
    except (EngineError, PromptError) as error:
        options.fail(str(error))
    figures: dict[str, dict[str, int]] = {}
    with typer.progressbar(length=sum(map(len, questions.values())), label="answering", show_pos=True) as bar:
        for kind, asked in questions.items():
            texts = checking.answer(engine, asked, max_tokens, lambda: bar.update(1))
            right = sum(checking.is_right(question, text) for question, text in zip(asked, texts, strict=True))
            figures[kind] = {"right": right, "asked": len(asked)}
    for kind, figure in figures.items():
        typer.echo(f"{kind}: {figure['right']} of {figure['asked']} right ({figure['right'] / max(1, figure['asked']):.0%})")
    if json is not None:
        result = {"model": config.model, "seed": seed, "answers": figures, "provenance": provenance().as_dict()}
        json.write_text(encoding.dumps(result, indent=1) + "\n", encoding="utf-8")


@bench.command()
def predictions(
    prompts: options.Prompts = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="How many of them.")] = 20,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 500,
    edits: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Places where the prediction is wrong. Give it again for more. (default: 1, 4, 8)"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Which prompts are drawn, and where predictions are wrong.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write all figures here as JSON.")] = None,
    model: options.Model = None,
    drafter: options.Drafter = None,
    dtype: options.DType = None,
    device: options.Device = None,
    num_threads: options.NumThreads = None,
    compile: options.Compile = None,
) -> None:
    """Predicted outputs: passes and time for answers that are known but for some edits, against the drafter alone.

    For example: moaserve bench predictions --edits 2 --edits 10
    """
    settings = options.load_settings(
        model=model, drafter=drafter, dtype=dtype, device=device, num_threads=num_threads, compile=compile, max_num_seqs=1
    )
    import json as encoding

    from benchmarks.machine import provenance
    from benchmarks.predictions import measure
    from benchmarks.prompts import BUNDLED_PROMPTS, PromptError, load_prompts
    from speculative.errors import EngineError
    from speculative.loading import load_engine

    config = settings.engine_config()
    try:
        engine = load_engine(config)
        if engine.tokenizer is None:
            options.fail(f"--model {config.model}: no tokenizer, so prompts cannot be encoded")
        if engine.drafter is None:
            options.fail("--drafter none: predictions are verified like drafts, and nothing is drafted")
        limit = engine.info.max_model_len - max_tokens
        selected = load_prompts(prompts or BUNDLED_PROMPTS, engine.tokenizer, count=num_prompts, max_tokens=limit, seed=seed)
    except (EngineError, PromptError) as error:
        options.fail(str(error))
    with typer.progressbar(length=len(selected), label="decoding", show_pos=True) as bar:
        figures = measure(engine, selected, edits or [1, 4, 8], max_tokens=max_tokens, seed=seed, progress=lambda: bar.update(1))
    for one in figures:
        typer.echo(
            f"{one.edits} edits: {one.passes} passes where the drafter alone takes {one.passes_without} "
            f"({one.passes / max(1, one.passes_without):.2f}), {one.speed:.1f}x as fast in the median"
        )
    if json is not None:
        result = {"model": config.model, "drafter": config.drafter, "seed": seed, "max_tokens": max_tokens}
        result |= {"figures": [one.as_dict() for one in figures], "provenance": provenance().as_dict()}
        json.write_text(encoding.dumps(result, indent=1) + "\n", encoding="utf-8")


def _print(result: OfflineResult) -> None:
    """Two tables: speed, and how drafts fared."""
    from rich.console import Console
    from rich.table import Table

    from benchmarks.offline import PLAIN, SPECULATIVE, spread

    console = Console()
    speed = Table(title=f"{result.settings['model']}, {result.settings['dtype']}, {len(result.prompts)} prompts, greedy")
    for column in ("", "tokens/s", "over plain (median, quartiles)", "same tokens as plain"):
        speed.add_column(column, justify="left" if not column else "right")
    for way in result.runs:
        ratio = spread(result.ratios(way, PLAIN))
        speed.add_row(
            way,
            f"{result.tokens_per_second(way):.0f}",
            f"{ratio['median']:.2f}x ({ratio['p25']:.2f}–{ratio['p75']:.2f})",
            f"{result.identical(way, PLAIN)} of {len(result.prompts)}",
        )
    console.print(speed)
    acceptance = result.acceptance()
    drafts = Table(title=f"drafter: {result.settings['drafter']}")
    for column in ("τ", "target passes", "drafted", "accepted", "accepted at depth 1, 2, …"):
        drafts.add_column(column, justify="right")
    drafts.add_row(
        f"{acceptance.tau:.2f}",
        str(acceptance.target_passes),
        str(acceptance.drafted),
        str(acceptance.accepted),
        "  ".join(f"{share:.0%}" for share in acceptance.by_depth),
    )
    console.print(drafts)
    console.print("τ by source: " + ", ".join(f"{source} {tau:.2f}" for source, tau in result.tau_by_source().items()))
    decoding = result.decode_ratio(SPECULATIVE, PLAIN)
    console.print(f"decoding alone, prefill left out: speculative is {decoding:.2f}x plain over all prompts")
    console.print(result.provenance.line())
