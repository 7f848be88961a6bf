"""`moaserve pretrain`: the options, and what they mean."""

from __future__ import annotations

from typing import Annotated

import typer

from training import options
from training.options import LOSS, RUN, SIZES


def pretrain_command(
    data: options.Data,
    out: options.Out,
    base: Annotated[
        str,
        typer.Option(
            help="The target to go on from: a folder, a hub id, or 'bundled'. Its tokenizer, chat template and generation settings "
            "are kept.",
            rich_help_panel=RUN,
        ),
    ] = "bundled",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start from random weights, not from the base's.", rich_help_panel=RUN)
    ] = False,
    valid: options.Valid = None,
    epochs: options.Epochs = None,
    max_steps: options.MaxSteps = None,
    max_minutes: options.MaxMinutes = None,
    resume: options.Resume = False,
    hidden_size: Annotated[
        int | None, typer.Option(help="With --fresh: width, a multiple of --heads. (default: the base's)", rich_help_panel=SIZES)
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="With --fresh: decoder layers. (default: the base's)", rich_help_panel=SIZES)
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="With --fresh: query heads. (default: the base's)", rich_help_panel=SIZES)
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="With --fresh: key and value heads. (default: the base's)", rich_help_panel=SIZES)
    ] = None,
    mlp: Annotated[
        int | None, typer.Option(help="With --fresh: width of the MLPs. (default: the base's)", rich_help_panel=SIZES)
    ] = None,
    prompt_weight: Annotated[
        float,
        typer.Option(
            help="What a token that no assistant wrote counts in the loss; one that an assistant wrote counts 1.",
            rich_help_panel=LOSS,
        ),
    ] = 1.0,
    optimizer: options.Optimizer = "adamw",
    lr: options.LearningRate = 1e-3,
    warmup: options.Warmup = 100,
    schedule: options.Schedule = "cosine",
    weight_decay: options.WeightDecay = 0.05,
    beta2: options.Beta2 = 0.95,
    clip: options.Clip = 1.0,
    batch_tokens: options.BatchTokens = 4096,
    accumulate: options.Accumulate = 1,
    max_length: options.MaxLength = 2048,
    seed: options.Seed = 0,
    dtype: options.DType = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    compile_: options.Compile = False,
    log_every: options.LogEvery = 10,
    checkpoint_steps: options.CheckpointSteps = None,
    checkpoint_minutes: options.CheckpointMinutes = 10.0,
    valid_every: options.ValidEvery = 500,
    valid_tokens: options.ValidTokens = 100_000,
    cache: options.Cache = None,
) -> None:
    """Train a small target on chats: how the bundled one was made, and how to make another.

    What comes out is a Hugging Face checkpoint in bfloat16. Ctrl-C saves and stops; the same command with --resume goes on exactly
    where it was. A drafter for it is trained afterwards, with moaserve train.

    Example: moaserve pretrain --data chats.jsonl.gz --valid others.jsonl.gz --epochs 3 --out runs/target

    Several processes: accelerate launch --multi_gpu --num_processes 2 --no_python moaserve pretrain --data … --accumulate 2
    """
    given = options.settings(locals())
    options.check_installed("pretrain")
    from training.config import PretrainConfig
    from training.run import pretrain

    folder = options.run("pretrain", lambda: pretrain(PretrainConfig(**given)))
    options.say(f"trained target in {folder}")


app = typer.Typer(add_completion=False)
app.command("pretrain")(pretrain_command)

if __name__ == "__main__":
    app()
