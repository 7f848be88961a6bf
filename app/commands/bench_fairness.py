"""`moaserve bench fairness`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from app.commands import loading, options

ROOM = 512
"""Tokens of context beyond the long prompt: its answer, and what tokenizing its text anew adds."""


def fairness(
    streams: Annotated[int, typer.Option(min=1, help="Streams that run when the prompt comes.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 4000,
    repeats: Annotated[int, typer.Option(min=1, help="How many prompts come, one at a time.")] = 5,
    settling: Annotated[float, typer.Option(min=0, help="Seconds for which the streams run before that.")] = 2.0,
    prompts: options.Prompts = None,
    seed: Annotated[int, typer.Option(help="Which prompts the texts are made of.")] = 0,
    json: options.ResultFile = None,
    model: Annotated[
        str, typer.Option(help="The target: 'bundled', a folder or a hub id.", rich_help_panel=options.ENGINE)
    ] = "bundled",
    drafter: options.Drafter = None,
    dtype: options.DType = None,
    device: options.Device = None,
    prefill_chunk: options.PrefillChunk = None,
    num_threads: options.NumThreads = None,
    compile: options.Compile = None,
) -> None:
    """How long streams wait for their next token while a long prompt is read beside them.

    Starts a server, lets a prompt come amid streams, and shows the longest gap of the stream that was held up most, in its own
    median gaps; how long the prompt's first token took, and how long it takes where nothing else runs. Of a model with a shorter
    context a copy is served whose later positions nobody has trained: their cost is the same, and what they say is not looked at.

    For example: moaserve bench fairness --json fairness.json
    """
    import asyncio

    import httpx

    from benchmarks import fairness as measuring
    from benchmarks.machine import write_json
    from benchmarks.network.processes import ProcessError
    from benchmarks.prompts import BUNDLED_PROMPTS, load_prompts
    from models.loader import BUNDLED, resolve_target

    length = prompt_tokens + ROOM
    given = {"dtype": dtype, "device": device, "prefill_chunk": prefill_chunk, "num_threads": num_threads, "compile": compile}
    with loading.clear_errors(), tempfile.TemporaryDirectory() as folder:
        tokenizer = loading.load_tokenizer(model)
        selected = load_prompts(prompts or BUNDLED_PROMPTS, tokenizer, count=64, max_tokens=ROOM // 2, seed=seed)
        served = measuring.with_longer_context(resolve_target(model), length, Path(folder))
        chosen = drafter or (str(BUNDLED["drafter"]) if model == "bundled" else "ngram")
        told = {"model": served, "drafter": chosen, "max_model_len": length, "max_num_seqs": streams + 1, **given}
        pairs = [("--" + name.replace("_", "-"), str(value)) for name, value in told.items() if value is not None]
        with typer.progressbar(length=repeats + 1, label="measuring", show_pos=True) as bar:
            measured = measuring.measure(
                [word for pair in pairs for word in pair],
                tokenizer,
                selected,
                num_streams=streams,
                prompt_tokens=prompt_tokens,
                repeats=repeats,
                settling=settling,
                stream_tokens=length - ROOM // 2,
                progress=lambda: bar.update(1),
            )
            try:
                arrivals = asyncio.run(measured)
            except (ProcessError, httpx.HTTPError) as error:
                options.fail(f"the server: {error}")
            except measuring.StreamEndedError:
                options.fail(f"--prompt-tokens {prompt_tokens}: the streams ended before it was read; try fewer --streams")
    for arrival in arrivals:
        typer.echo(arrival.line())
    worst = max(arrival.worst.ratio for arrival in arrivals)
    first, alone = (median(getattr(arrival, name) for arrival in arrivals) for name in ("first", "first_alone"))
    typer.echo(
        f"No stream waited longer than {worst:.2f}x its median gap. The prompt's first token took {first:.2f} s in the median, "
        f"{alone:.2f} alone."
    )
    if json is not None:
        settings = {"model": model, "drafter": chosen, "streams": streams, "context": length, "settling": settling, "seed": seed}
        figures = {"worst_ratio": worst, "first": first, "first_alone": alone, "arrivals": [each.as_dict() for each in arrivals]}
        write_json({"settings": {**settings, **given}} | figures, json)
