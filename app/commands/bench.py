"""`moaserve bench`: measurements, each a sub-command; those of running servers are in ``bench_servers``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import httpx
import typer

from app.commands import loading, options, tables
from speculative.garbage import keep_what_is_loaded

bench = typer.Typer(name="bench", help="Measure speed and acceptance on this machine.", no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    """Measure speed and acceptance on this machine."""


@bench.command()
def offline(
    prompts: options.Prompts = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="How many of them; with --conversations, how many conversations.")] = 32,
    conversations: Annotated[
        bool,
        typer.Option(
            "--conversations",
            help="Ask for each answer of a dialogue in turn, as a chat does; what has been read of it stays in the prefix cache.",
        ),
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens generated per prompt.")] = 128,
    max_prompt_tokens: options.MaxPromptTokens = 1024,
    seed: Annotated[int, typer.Option(help="Which prompts are drawn.")] = 0,
    transformers: Annotated[
        bool, typer.Option("--transformers/--no-transformers", help="Also run transformers' generate, for comparison.")
    ] = True,
    json: options.ResultFile = None,
    model: options.Model = None,
    dtype: options.DType = None,
    device: options.Device = None,
    max_model_len: options.MaxModelLen = None,
    num_threads: options.NumThreads = None,
    compile: options.Compile = None,
    tensor_parallel_size: options.TensorParallelSize = None,
    drafter: options.Drafter = None,
    draft_policy: options.DraftPolicy = None,
    draft_depth: options.DraftDepth = None,
    draft_breadth: options.DraftBreadth = None,
    draft_nodes: options.DraftNodes = None,
    draft_min_reach: options.DraftMinReach = None,
    draft_temperature: options.DraftTemperature = None,
    draft_lookup: options.DraftLookup = None,
    draft_window: options.DraftWindow = None,
) -> None:
    """Plain against speculative decoding and against transformers' generate: same prompts, same weights, one run.

    Every prompt is decoded greedily in each way in turn, one at a time, without HTTP. A ratio is the median over prompts, or over
    conversations. Prompts are read anew each time, but for what --conversations keeps; transformers keeps nothing. After Ctrl-C
    there are figures of the prompts before.

    For example:

      moaserve bench offline

      moaserve bench offline --prompts my.jsonl --num-prompts 100 --json result.json

      moaserve bench offline --prompts my.jsonl --conversations
    """
    config = options.engine_config(locals() | {"max_num_seqs": 1})
    from benchmarks import offline as measuring
    from benchmarks.decoding import load_transformers
    from benchmarks.machine import write_text
    from benchmarks.prompts import BUNDLED_PROMPTS, load_conversations, load_prompts

    if conversations:
        # One conversation read by both ways, and answers, with which it does not go on.
        config = replace(config, prefix_cache_tokens=4 * (max_prompt_tokens + max_tokens))
    with loading.clear_errors():
        # Before the model, which may take minutes: so what is wrong with a file is told at once.
        tokenizer, positions = loading.load_tokenizer(config.model), loading.positions(config.model)
        limit = min(max_prompt_tokens, min(config.max_model_len or positions, positions) - max_tokens)
        select = load_conversations if conversations else load_prompts
        selected = select(prompts or BUNDLED_PROMPTS, tokenizer, count=num_prompts, max_tokens=limit, seed=seed)
        engine, _ = loading.load_engine(config)
    reference = load_transformers(config.model, engine.info.dtype, engine.info.device) if transformers else None
    keep_what_is_loaded()  # as the server does
    with typer.progressbar(length=len(selected), label="decoding", show_pos=True) as bar:
        result = measuring.run_offline(
            engine, config, selected, max_tokens=max_tokens, reference=reference, progress=lambda: bar.update(1)
        )
    tables.print_offline(result)
    if json is not None:
        write_text(result.to_json(), json)
    options.fail_if_interrupted(len(result.prompts), len(selected), "prompts")


@bench.command()
def answers(
    prompts: Annotated[
        Path, typer.Option(help='Held-out dialogues as JSONL, plain or gzipped: {"messages": […], "tools": […]?}.', exists=True)
    ],
    num_prompts: Annotated[int, typer.Option(min=1, help="How many questions of each kind.")] = 100,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens generated per question.")] = 256,
    strict_tools: Annotated[
        bool, typer.Option("--strict-tools", help="Have calls follow their tools' schemas, as where a request's tools are strict.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Which dialogues are drawn.")] = 0,
    json: options.ResultFile = None,
    model: options.Model = None,
    drafter: options.Drafter = None,
    dtype: options.DType = None,
    device: options.Device = None,
    num_threads: options.NumThreads = None,
    compile: options.Compile = None,
    tensor_parallel_size: options.TensorParallelSize = None,
    max_num_seqs: options.MaxNumSeqs = 16,
) -> None:
    """How often a target is right, greedily: its first tool call of a dialogue, the number in "The answer is …", small talk.

    A tool call is right when name and arguments are the dialogue's; a reply, when it is the same text. After Ctrl-C there are
    figures of the questions before.

    For example: moaserve bench answers --model runs/target --prompts test.jsonl.gz
    """
    config = options.engine_config(locals())
    from benchmarks import answers as checking
    from benchmarks.interrupting import until_interrupted
    from benchmarks.machine import write_json

    with loading.clear_errors():
        tokenizer, limit = loading.load_tokenizer(config.model), loading.positions(config.model) - max_tokens
        questions = checking.read_questions(
            prompts, tokenizer, count=num_prompts, max_tokens=limit, seed=seed, strict_tools=strict_tools
        )
        engine, _ = loading.load_engine(config)
    figures: dict[str, dict[str, int]] = {}
    total, done = sum(map(len, questions.values())), 0
    with typer.progressbar(length=total, label="answering", show_pos=True) as bar, until_interrupted(lambda: done):
        for kind, asked in questions.items():
            figures[kind] = {"right": 0, "asked": 0}
            for question, text in zip(asked, checking.answer(engine, asked, max_tokens, lambda: bar.update(1)), strict=True):
                figures[kind]["right"] += checking.is_right(question, text)
                figures[kind]["asked"] += 1
                done += 1
    for kind, figure in figures.items():
        typer.echo(f"{kind}: {figure['right']} of {figure['asked']} right ({figure['right'] / max(1, figure['asked']):.0%})")
    if json is not None:
        write_json({"model": config.model, "seed": seed, "strict_tools": strict_tools, "answers": figures}, json)
    options.fail_if_interrupted(done, total, "questions")


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
    json: options.ResultFile = None,
    model: options.Model = None,
    drafter: options.Drafter = None,
    draft_policy: options.DraftPolicy = None,
    dtype: options.DType = None,
    device: options.Device = None,
    num_threads: options.NumThreads = None,
    compile: options.Compile = None,
    tensor_parallel_size: options.TensorParallelSize = None,
) -> None:
    """Predicted outputs: passes and time for answers that are known but for some edits, against the drafter alone.

    After Ctrl-C there are figures of the prompts before.

    For example: moaserve bench predictions --edits 2 --edits 10
    """
    config = options.engine_config(locals() | {"max_num_seqs": 1})
    places = list(dict.fromkeys(edits or [1, 4, 8]))
    if max(places) > max_tokens:
        options.fail(f"--edits {max(places)}: an answer has no more places than its --max-tokens {max_tokens}", code=2)
    from benchmarks.machine import write_json
    from benchmarks.predictions import measure
    from benchmarks.prompts import BUNDLED_PROMPTS, load_prompts

    with loading.clear_errors():
        tokenizer, limit = loading.load_tokenizer(config.model), loading.positions(config.model) - max_tokens
        selected = load_prompts(prompts or BUNDLED_PROMPTS, tokenizer, count=num_prompts, max_tokens=limit, seed=seed)
        engine, _ = loading.load_engine(config)
        if engine.drafter is None:
            options.fail("--drafter none: predictions are verified like drafts, and nothing is drafted")
    with typer.progressbar(length=len(selected), label="decoding", show_pos=True) as bar:
        figures = measure(engine, selected, places, max_tokens=max_tokens, seed=seed, progress=lambda: bar.update(1))
    for one in figures:
        typer.echo(one.line())
    if json is not None:
        how = {"model": config.model, "drafter": engine.info.drafter, "dtype": engine.info.dtype}
        result = {**how, "seed": seed, "max_tokens": max_tokens}
        write_json(result | {"figures": [one.as_dict() for one in figures]}, json)
    options.fail_if_interrupted(figures[0].prompts, len(selected), "prompts")


@bench.command()
def watching(
    prompts: options.Prompts = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests of a round, for each way.")] = 32,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds; the ways take turns within each.")] = 8,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated for each request.")] = 64,
    extra: Annotated[
        str | None, typer.Option(help="JSON object of parameters; requests that have them are measured as a third way.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Which questions are drawn.")] = 0,
    json: options.ResultFile = None,
    model: options.Model = None,
    drafter: options.Drafter = None,
    dtype: options.DType = None,
    device: options.Device = None,
    num_threads: options.NumThreads = None,
    compile: options.Compile = None,
    tensor_parallel_size: options.TensorParallelSize = None,
) -> None:
    """What recording metrics costs: tokens per second with and without it, in turn, and its processor time alone.

    After Ctrl-C there are figures of the rounds before.

    For example: moaserve bench watching --extra '{"logprobs": true}'
    """
    config = options.engine_config(locals() | {"max_num_seqs": concurrency})
    more = options.json_object("--extra", extra)
    import asyncio

    from benchmarks import watching as measuring
    from benchmarks.interrupting import until_interrupted
    from benchmarks.machine import decoding_settings, write_json
    from benchmarks.prompts import BUNDLED_PROMPTS

    result = measuring.WatchingResult(concurrency)
    with loading.clear_errors(), typer.progressbar(length=rounds, label="measuring", show_pos=True) as bar:
        asked = measuring.questions(prompts or BUNDLED_PROMPTS, num_requests, seed)
        running = measuring.measure(
            config, asked, result, rounds=rounds, max_tokens=max_tokens, extra=more, progress=lambda: bar.update(1)
        )
        try:
            with until_interrupted(lambda: result.num_rounds):
                asyncio.run(running)
        except httpx.HTTPStatusError as error:
            options.fail(f"--extra {extra}: {error}")
    tables.print_watching(result)
    if json is not None:
        settings = {**decoding_settings(config), "num_requests": num_requests, "max_tokens": max_tokens, "extra": more}
        write_json({"settings": settings} | result.as_dict(), json)
    options.fail_if_interrupted(result.num_rounds, rounds, "rounds")
