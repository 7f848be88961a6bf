"""`moaserve bench soak`."""

from __future__ import annotations

from typing import Annotated

import typer

from app.commands import loading, options

MIB = 2**20


def soak(
    num_requests: Annotated[int, typer.Option(min=100, help="How many requests, of twelve kinds in turn.")] = 20_000,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 16,
    every: Annotated[int, typer.Option(min=1, help="Requests after which memory is looked at again.")] = 100,
    most_growth: Annotated[
        float, typer.Option(min=0, help="MiB by which the last quarter may exceed the second; more ends with exit code 1.")
    ] = 16.0,
    seed: Annotated[int, typer.Option(help="Which prompts are drawn.")] = 0,
    json: options.ResultFile = None,
    model: Annotated[
        str, typer.Option(help="The target: 'bundled', a folder or a hub id.", rich_help_panel=options.ENGINE)
    ] = "bundled",
    drafter: options.Drafter = None,
    dtype: options.DType = None,
    device: options.Device = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = None,
    prefix_cache_tokens: options.PrefixCacheTokens = 4096,
    memory_limit: options.MemoryLimit = None,
    num_threads: options.NumThreads = None,
    compile: options.Compile = None,
) -> None:
    """Whether a server's memory grows with the requests that it has answered.

    Starts a server and sends chats, completions, tools, structured output, log-probabilities, predictions, kept responses, requests
    that it must refuse and streams whose client leaves; no two are the same. Before them as many texts as run at once grow as long
    as can be, and prefix cache and store are kept small, so that what fills up is full early. Ends with exit code 1 where memory
    grows by more than --most-growth.

    For example: moaserve bench soak --memory-limit 1GiB --json soak.json
    """
    import asyncio

    import httpx

    from benchmarks import soak as measuring
    from benchmarks.machine import write_json
    from benchmarks.network.processes import ProcessError
    from benchmarks.prompts import BUNDLED_PROMPTS, load_prompts
    from speculative.config import EngineConfig

    told = {"model": model, "drafter": drafter, "dtype": dtype, "device": device, "max_model_len": max_model_len}
    told |= {"max_num_seqs": max_num_seqs, "prefix_cache_tokens": prefix_cache_tokens, "memory_limit": memory_limit}
    given = {name: value for name, value in told.items() if value is not None}
    given |= {name: value for name, value in (("num_threads", num_threads), ("compile", compile)) if value is not None}
    arguments = [word for name, value in given.items() for word in ("--" + name.replace("_", "-"), str(value))]
    with loading.clear_errors():
        tokenizer = loading.load_tokenizer(model)
        prompts = load_prompts(BUNDLED_PROMPTS, tokenizer, count=64, max_tokens=200, seed=seed)
    texts = [str(tokenizer.decode(list(prompt.token_ids), skip_special_tokens=True)) for prompt in prompts]
    with typer.progressbar(length=num_requests, label="asking", show_pos=True) as bar:
        running = measuring.measure(
            [*arguments, "--store-max-responses", "200", "--log-level", "error"],
            texts,
            num_requests=num_requests,
            num_longest=max_num_seqs or EngineConfig().max_num_seqs,
            concurrency=concurrency,
            every=min(every, num_requests // 20),
            progress=lambda: bar.update(1),
        )
        try:
            result = asyncio.run(running)
        except (ProcessError, measuring.SoakError, httpx.HTTPError) as error:
            options.fail(f"the server: {str(error) or type(error).__name__}")
    typer.echo(result.line())
    if json is not None:
        settings = {**given, "num_requests": num_requests, "concurrency": concurrency, "seed": seed}
        write_json({"settings": settings} | result.as_dict(), json)
    raise typer.Exit(1 if result.growth > most_growth * MIB else 0)
