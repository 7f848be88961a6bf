"""`moaserve bench capacity`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.commands import loading, options

SESSIONS = "Sessions"


def capacity(
    costs: Annotated[
        Path, typer.Option(help="What a replica costs: a file of `moaserve bench costs`, or one like it written by hand.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for capacity.json and capacity.png.", callback=options.writable_folder)] = Path(
        "capacity"
    ),
    sessions: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Concurrent sessions. Give it again for more. (default: 1000, 10000, 100000, 1000000)"),
    ] = None,
    ttft: Annotated[float, typer.Option(min=0, help="Seconds within which 99 of 100 first tokens come.")] = 1.0,
    tpot: Annotated[float, typer.Option(min=0, help="Seconds that a token after the first takes in 99 of 100 answers.")] = 0.05,
    headroom: Annotated[float, typer.Option(min=0, max=0.9, help="Share of what replicas carry that is left free.")] = 0.25,
    first_prompt: Annotated[float, typer.Option(min=1, help="Tokens of a session's first prompt.", rich_help_panel=SESSIONS)] = 300,
    question: Annotated[float, typer.Option(min=1, help="Tokens that each later turn adds.", rich_help_panel=SESSIONS)] = 40,
    answer: Annotated[float, typer.Option(min=1, help="Tokens of an answer.", rich_help_panel=SESSIONS)] = 80,
    turns: Annotated[float, typer.Option(min=1, help="Turns of a session.", rich_help_panel=SESSIONS)] = 8,
    think: Annotated[
        float, typer.Option(min=0.001, help="Seconds between an answer and the next question.", rich_help_panel=SESSIONS)
    ] = 30,
    affinity: Annotated[
        float, typer.Option(min=0, max=1, help="Share of follow-ups that land where their prefix is.", rich_help_panel=SESSIONS)
    ] = 0.95,
    prefix_cache_tokens: Annotated[
        int | None, typer.Option(min=0, help="Tokens of ended texts that a replica keeps (default: as the costs say).")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Simulated for each number of sessions, after a warm-up.")] = 120,
    seed: Annotated[int, typer.Option(help="Which sessions are drawn.")] = 0,
    against: Annotated[
        Path | None, typer.Option(help="A serving.json of `moaserve bench serving`: also compare the simulation with it.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(help="The prompts that were asked there (default: the bundled ones).")] = None,
) -> None:
    """How many replicas, how much Redis and how many cores of HTTP so many sessions need, and what is full first.

    Sessions (means; lengths and thinking vary) run on a replica in simulated time, its engine step by step, until more of
    them would miss the goals; once with follow-ups sent to where their prefix is, once with them sent anywhere and Redis to bring
    prefixes, once with neither. What one replica carries is then scaled to all sessions.

    For example:

      moaserve bench costs --num-threads 1 --json costs.json

      moaserve bench capacity --costs costs.json --sessions 5000 --think 60
    """
    from dataclasses import replace

    from benchmarks.capacity import against as comparing
    from benchmarks.capacity import planning
    from benchmarks.capacity.costs import CostsError, Workload, costs_dict, read_costs
    from benchmarks.capacity.drawing import draw
    from benchmarks.machine import write_json
    from benchmarks.prompts import BUNDLED_PROMPTS, load_prompts

    counts = sorted(sessions or [1000, 10_000, 100_000, 1_000_000])
    goals, limits = planning.Goals(ttft, tpot), planning.Limits()
    workload = Workload(first_prompt, question, answer, turns, think, affinity)
    compared: list[comparing.Compared] = []
    try:
        told = read_costs(costs)
        if prefix_cache_tokens is not None:
            told = replace(told, engine=replace(told.engine, prefix_tokens=prefix_cache_tokens))
        if against is not None:
            with loading.clear_errors():
                tokenizer = loading.load_tokenizer(told.model)
                asked = load_prompts(prompts or BUNDLED_PROMPTS, tokenizer, count=64, max_tokens=1024, seed=seed, with_answers=True)
            compared = comparing.compare(against, told, asked, seed=seed)
    except CostsError as error:
        options.fail(str(error))
    with typer.progressbar(length=len(planning.WAYS), label="simulating", show_pos=True) as bar:
        found = []
        for way in planning.WAYS:
            found.append(planning.carry(told, workload, way, goals, seconds=seconds, seed=seed, progress=lambda: bar.update(0)))
            bar.update(1)
    if not all(each.sessions for each in found):
        options.fail(f"--ttft {ttft:g} --tpot {tpot:g}: one replica does not keep to that even with few sessions")
    plans = {each.way: [planning.needs(told, each, count, limits, headroom) for count in counts] for each in found}
    ends = planning.saturation(told, found[0], limits)
    for comparison in compared:
        typer.echo(comparison.line())
    for each in found:
        one = each.at
        typer.echo(
            f"{each.way}: a replica carries {each.sessions} sessions, {one.tokens_per_second:.0f} tokens/s; "
            f"{one.read:.0f} tokens of a prompt of {one.prompt:.0f} read, {one.fetched:.0f} from Redis"
        )
        for row in plans[each.way]:
            typer.echo(
                f"  {row.sessions:>9,} sessions: {row.replicas:,} replicas, {row.redis_servers:,} Redis "
                f"({row.redis_memory / planning.GIB:,.1f} GiB, {row.redis_in * 8e-9:.2f} Gbit/s in, {row.redis_out * 8e-9:.2f} "
                "out), "
                f"{row.ingress_cores:,} event loops"
            )
    for name, end in ends.items():
        typer.echo(f"{name} is full at {end:,.0f} sessions")
    out.mkdir(parents=True, exist_ok=True)
    kind = told.origin.split(":")[0]
    title = f"{told.model}: {kind} costs; 99% of first tokens within {ttft:g} s, of others within {tpot * 1000:g} ms"
    draw(plans, ends, out / "capacity.png", title=title)
    settings = {"costs": str(costs), "sessions": counts, "ttft": ttft, "tpot": tpot, "headroom": headroom, "seed": seed}
    figures = {
        "costs": costs_dict(told),
        "carried": [each.as_dict() for each in found],
        "plans": {way: [row.as_dict() for row in rows] for way, rows in plans.items()},
        "full_at": ends,
        "against": [each.as_dict() for each in compared],
    }
    write_json({"settings": settings} | figures, out / "capacity.json")
