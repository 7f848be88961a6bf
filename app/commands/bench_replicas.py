"""`moaserve bench replicas`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from app.commands import options

PARTS = ("throughput", "chats", "updates", "kills")


def replicas(
    replicas: Annotated[int, typer.Option(min=2, help="Engines on a Ray cluster of this machine.")] = 3,
    parts: Annotated[str, typer.Option(help=f"What to measure, with commas: {', '.join(PARTS)}.")] = ",".join(PARTS),
    streams: Annotated[int, typer.Option(min=1, help="Texts at once under kills.")] = 16,
    kills: Annotated[int, typer.Option(min=1, help="Replicas to kill at random.")] = 50,
    kill_seconds: Annotated[float, typer.Option(min=1, help="Seconds after which no more are killed.")] = 3600,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each text; a quarter of that in chats and updates.")] = 256,
    chats: Annotated[int, typer.Option(min=1, help="Chats of four turns.")] = 60,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of throughput, of each way in turn.")] = 5,
    seed: Annotated[int, typer.Option(help="Which replica is killed when.")] = 0,
    json: options.ResultFile = None,
    drafter: options.Drafter = None,
    compile: options.Compile = "off",
) -> None:
    """Whether replicas add up, chats return to where they are known, and nothing is lost when replicas die or are replaced.

    Runs the bundled model in float32, one thread a replica. Throughput: replicas behind their ingress against as many servers whose
    load is dealt out by hand, and against one server. Ends with exit code 1 where a text differs from an undisturbed run's, or a
    request fails. Needs moaserve's extra ray.

    For example: moaserve bench replicas --kills 50 --json replicas.json
    """
    import asyncio

    if unknown := set(wanted := parts.split(",")) - set(PARTS):
        options.fail(f"--parts: there is no {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}", code=2)
    try:
        from benchmarks.replicas.hosting import hosted
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        options.fail("moaserve bench replicas needs Ray: pip install 'moaserve[ray]'")
    from app.cluster_settings import ClusterSettings
    from benchmarks.machine import write_json
    from benchmarks.replicas import measuring
    from benchmarks.replicas.throughput import throughput

    given: dict[str, Any] = {
        "dtype": "float32", "num_threads": 1, "max_num_seqs": 8, "max_model_len": 1024, "prefill_chunk": 128,
        "prefix_cache_tokens": 32768, "compile": compile, "log_level": "error",
    }  # fmt: skip
    if drafter is not None:
        given["drafter"] = drafter
    cluster: dict[str, Any] = {"replicas": replicas, "replica_cpus": 0.3, "shutdown_timeout": 30}
    result: dict[str, Any] = {"settings": given | cluster}

    def tell(name: str, figures: dict[str, Any]) -> None:
        result[name] = figures
        typer.echo(f"{name}: {figures}")
        if json is not None:
            write_json(result, json)  # at once: what comes next may be stopped

    async def measure() -> bool:
        well = True
        if "throughput" in wanted:
            figures = await throughput(given, cluster, rounds=rounds, streams=8 * replicas, max_tokens=max_tokens // 4)
            tell("throughput", figures.as_dict())
        if wanted == ["throughput"]:
            return well
        settings = ClusterSettings(**given, **cluster)
        async with hosted(settings) as host:
            if "chats" in wanted:
                tell("chats", (await measuring.chat(host, chats, 4, 8, max_tokens // 4)).as_dict())
            if "kills" in wanted:
                killed = await measuring.kill(host, kills, streams, max_tokens, seed, kill_seconds)
                tell("kills", killed.as_dict())
                well = well and killed.same == killed.texts
                await host.all_ready(replicas)
            if "updates" in wanted:
                for name, changes, same in (("drafter", {"drafter": "ngram"}, True), ("target", {"dtype": "bfloat16"}, False)):
                    updated = await measuring.update(host, settings, changes, 8, max_tokens // 4, same=same)
                    tell(f"update of the {name}", updated.as_dict())
                    well = well and not updated.failed and not updated.different
        return well

    well = asyncio.run(measure())
    raise typer.Exit(0 if well else 1)
