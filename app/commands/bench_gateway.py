"""`moaserve bench gateway`."""

from __future__ import annotations

from typing import Annotated

import typer

from app.commands import loading, options, tables


def gateway(
    prompts: options.Prompts = None,
    num_requests: Annotated[int, typer.Option(min=1, help="Requests of a round, for each way.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the ways take turns within each.")] = 7,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, help="Requests at once. Give it again for more. (default: 1, 32)")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated for each request.")] = 128,
    seed: Annotated[int, typer.Option(help="Which questions are drawn.")] = 0,
    json: options.ResultFile = None,
    model: options.Model = None,
    drafter: options.Drafter = None,
    dtype: options.DType = None,
    device: options.Device = None,
    num_threads: options.NumThreads = None,
    compile: options.Compile = None,
) -> None:
    """What HTTP, server-sent events and JSON cost: tokens per second over HTTP against the engine's own, in turn.

    Then requests that are large in one way or another are posted amid streams, and the longest time is told that the event loop
    was held up, and by what. After Ctrl-C there are figures of what was done before.

    For example: moaserve bench gateway --json result.json
    """
    at_once = sorted(set(concurrency or (1, 32)))
    config = options.engine_config(locals() | {"max_num_seqs": max(at_once)})
    from benchmarks import gateway as measuring
    from benchmarks.interrupting import until_interrupted
    from benchmarks.machine import decoding_settings, write_json
    from benchmarks.prompts import BUNDLED_PROMPTS
    from benchmarks.watching import questions
    from speculative.async_engine import AsyncEngine

    result, whole = measuring.GatewayResult(), False
    with loading.clear_errors(), typer.progressbar(length=len(at_once) * rounds, label="measuring", show_pos=True) as bar:
        asked = questions(prompts or BUNDLED_PROMPTS, num_requests, seed)
        try:
            with until_interrupted(lambda: result.rounds):
                measuring.measure(
                    AsyncEngine.from_config(config),
                    config,
                    asked,
                    result,
                    concurrencies=at_once,
                    rounds=rounds,
                    max_tokens=max_tokens,
                    progress=lambda: bar.update(1),
                )
                whole = True
        except measuring.GatewayError as error:
            options.fail(str(error))
    tables.print_gateway(result)
    if json is not None:
        settings = {**decoding_settings(config), "num_requests": num_requests, "max_tokens": max_tokens, "seed": seed}
        write_json({"settings": settings} | result.as_dict(), json)
    if not whole:
        options.fail("not everything was measured: it was interrupted")
