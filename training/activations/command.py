"""`moaserve activations`: the options, and what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from training import options
from training.choices import Method, Precision
from training.options import MACHINE, RUN


def activations_command(
    target: Annotated[str, typer.Option(help="Target model: a folder, a hub id or 'bundled'.", rich_help_panel=RUN)],
    data: options.Data,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for the activations, on a disk with room for them: their size is said first.",
            parser=options.named,
            metavar=options.PLACE,
            rich_help_panel=RUN,
        ),
    ],
    valid: options.Valid = None,
    method: Annotated[
        Method, typer.Option(help="Keep what drafters of this kind learn from, as in moaserve train.", rich_help_panel=RUN)
    ] = "moa",
    layers_inferred: Annotated[
        int, typer.Option(help="N of the drafters that will be trained: the input of layer L − N is kept too.", rich_help_panel=RUN)
    ] = 0,
    regenerate: options.Regenerate = None,
    regenerate_temperature: options.RegenerateTemperature = 0.0,
    batch_tokens: options.BatchTokens = 8192,
    max_length: options.MaxLength = 2048,
    seed: options.Seed = 0,
    valid_tokens: options.ValidTokens = 100_000,
    shard_mb: Annotated[
        int,
        typer.Option(
            help="Size of a file in million bytes; a run that is cut off goes on at the last whole one.", rich_help_panel=MACHINE
        ),
    ] = 512,
    shard_target: options.ShardTarget = False,
    dtype: Annotated[
        Precision,
        typer.Option(
            help="What is kept. The target computes in it too, or in float32 where that is faster.", rich_help_panel=MACHINE
        ),
    ] = "bfloat16",
    device: options.Device = "auto",
    threads: options.Threads = None,
    cache: options.Cache = None,
) -> None:
    """Run the target once over conversations and keep what drafters learn from, for moaserve train --activations.

    Then drafters are trained without the target, as many as you like. The folder holds the text too. What has been cut off goes on
    with the same command; several processes share the work.

    Example: moaserve activations --target ./my-model --data chats.jsonl.gz --valid others.jsonl.gz --out activations
    """
    given = options.settings(locals())
    options.check_installed("activations")
    from training.activations.config import ActivationsConfig
    from training.activations.run import make

    folder = options.run("activations", lambda: make(ActivationsConfig(**given)))
    options.say(f"activations in {folder}")


app = typer.Typer(add_completion=False)
app.command("activations")(activations_command)
