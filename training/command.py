"""`moaserve train`: the options, and what they mean."""

from __future__ import annotations

import signal
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class ScheduleName(str, Enum):
    """Learning-rate schedules."""

    constant = "constant"
    cosine = "cosine"
    linear = "linear"


class PrecisionName(str, Enum):
    """What forward passes compute in."""

    bfloat16 = "bfloat16"
    float32 = "float32"


RUN, SIZES, LOSS, STEPS, MACHINE = "Run", "Drafter sizes", "Loss and masks", "Optimisation", "Machine and records"


def train_command(
    target: Annotated[str, typer.Option(help="Target model: a folder or a hub id. It stays frozen.", rich_help_panel=RUN)],
    data: Annotated[
        str,
        typer.Option(
            help='Conversations: a .jsonl or .jsonl.gz file of {"messages": […], "tools": […]?}, or a datasets name with a '
            "messages column (owner/name or owner/name:split).",
            rich_help_panel=RUN,
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for the drafter, log.jsonl, training.json and checkpoints.", rich_help_panel=RUN)
    ],
    valid: Annotated[str | None, typer.Option(help="Held-out conversations, same forms as --data.", rich_help_panel=RUN)] = None,
    epochs: Annotated[
        float | None, typer.Option(help="Stop after this many passes over the data (paper: 40).", rich_help_panel=RUN)
    ] = None,
    max_steps: Annotated[int | None, typer.Option(help="Stop after this many updates.", rich_help_panel=RUN)] = None,
    max_minutes: Annotated[
        float | None, typer.Option(help="Stop after this long, earlier runs that are resumed included.", rich_help_panel=RUN)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.", rich_help_panel=RUN)
    ] = False,
    init_from: Annotated[
        str | None,
        typer.Option(
            help="Start from this drafter instead of random weights; smaller --lsa-mlp, --sa-mlp or --ca-mlp cut its MLPs to "
            "their strongest units, and --draft-block adds a block.",
            rich_help_panel=RUN,
        ),
    ] = None,
    regenerate: Annotated[
        int | None,
        typer.Option(
            help="Train on this many of the conversations, every assistant turn written anew by the target: what it writes is what "
            "the drafter will be asked to predict. (default: all, as they are)",
            rich_help_panel=RUN,
        ),
    ] = None,
    regenerate_temperature: Annotated[
        float, typer.Option(help="Temperature at which the target writes them; 0 is greedy.", rich_help_panel=RUN)
    ] = 0.0,
    lsa_kv_heads: Annotated[
        int | None,
        typer.Option(help="KV heads of layer self-attention (paper: 8, the target's number).", rich_help_panel=SIZES),
    ] = None,
    lsa_mlp: Annotated[
        int | None,
        typer.Option(help="MLP of layer self-attention (paper: 3072, 1.5 × the target's key-value size).", rich_help_panel=SIZES),
    ] = None,
    sa_kv_heads: Annotated[
        int | None, typer.Option(help="KV heads of self-attention (paper: 4, half the target's).", rich_help_panel=SIZES)
    ] = None,
    sa_mlp: Annotated[
        int | None, typer.Option(help="MLP of self-attention (paper: 6144, 1.5 × hidden size).", rich_help_panel=SIZES)
    ] = None,
    ca_kv_heads: Annotated[
        int | None, typer.Option(help="KV heads of cross-attention (paper: 4, half the target's).", rich_help_panel=SIZES)
    ] = None,
    ca_mlp: Annotated[
        int | None, typer.Option(help="MLP of cross-attention (paper: 6144, 1.5 × hidden size).", rich_help_panel=SIZES)
    ] = None,
    layers_inferred: Annotated[
        int,
        typer.Option(
            help="N: how many of the target's last layers the drafter borrows. 0 drafts fastest, 1 to 3 more accurately.",
            rich_help_panel=SIZES,
        ),
    ] = 0,
    draft_block: Annotated[
        int | None,
        typer.Option(
            help="Draft this many positions in one pass, with a small network from level to level, instead of running the whole "
            "drafter for each: cheaper and deeper trees. At least --max-interval − 1. (default: the paper's way)",
            rich_help_panel=SIZES,
        ),
    ] = None,
    draft_block_mlp: Annotated[
        int | None, typer.Option(help="Units of that small network. (default: the target's hidden size)", rich_help_panel=SIZES)
    ] = None,
    draft_vocabulary: Annotated[
        int | None,
        typer.Option(
            help="Let the drafter propose only this many tokens, those that the responses use most: cheaper levels. (default: all)",
            rich_help_panel=SIZES,
        ),
    ] = None,
    kl_weight: Annotated[
        float, typer.Option(help="Weight of KL(target ‖ drafter) on the next token (paper: 0.1).", rich_help_panel=LOSS)
    ] = 0.1,
    feature_weight: Annotated[
        float, typer.Option(help="Weight of smooth-L1 on the target's final hidden state (paper: 1).", rich_help_panel=LOSS)
    ] = 1.0,
    target_temperature: Annotated[
        float,
        typer.Option(
            help="Temperature of the target's distribution in that KL: below 1 the drafter learns what the target's best token is, "
            "for greedy decoding, rather than how it samples (paper: 1).",
            rich_help_panel=LOSS,
        ),
    ] = 1.0,
    min_interval: Annotated[
        int, typer.Option(help="Shortest distance of simulated verifications in tokens (paper: 6).", rich_help_panel=LOSS)
    ] = 6,
    max_interval: Annotated[
        int, typer.Option(help="Longest one (paper: 14). Draft depths 0 … max-2 are trained.", rich_help_panel=LOSS)
    ] = 14,
    staircase_until: Annotated[
        float,
        typer.Option(
            help="Share of the run over which self-attention is weaned from seeing drafted tokens only (paper: 0.5; 0 is off).",
            rich_help_panel=LOSS,
        ),
    ] = 0.5,
    lr: Annotated[
        float, typer.Option(help="Peak learning rate (paper: 3e-5; small drafters want 1e-3).", rich_help_panel=STEPS)
    ] = 3e-5,
    warmup: Annotated[int, typer.Option(help="Steps of linear warm-up (paper: 50).", rich_help_panel=STEPS)] = 50,
    schedule: Annotated[
        ScheduleName,
        typer.Option(help="After the warm-up (paper: constant). The others reach 0 at the nearest limit.", rich_help_panel=STEPS),
    ] = ScheduleName.constant,
    weight_decay: Annotated[float, typer.Option(help="AdamW's weight decay (paper: 0).", rich_help_panel=STEPS)] = 0.0,
    beta2: Annotated[float, typer.Option(help="AdamW's second moment decay.", rich_help_panel=STEPS)] = 0.999,
    clip: Annotated[float, typer.Option(help="Largest gradient norm (paper: 1).", rich_help_panel=STEPS)] = 1.0,
    batch_tokens: Annotated[
        int, typer.Option(help="Tokens a batch and process, padding included (paper: 32 × 2048).", rich_help_panel=STEPS)
    ] = 8192,
    accumulate: Annotated[int, typer.Option(help="Batches an update.", rich_help_panel=STEPS)] = 1,
    max_length: Annotated[int, typer.Option(help="Longer conversations are cut here (paper: 2048).", rich_help_panel=STEPS)] = 2048,
    seed: Annotated[int, typer.Option(help="Same seed, same drafter.", rich_help_panel=STEPS)] = 0,
    dtype: Annotated[
        PrecisionName,
        typer.Option(help="Compute type; the drafter's master weights are float32 with either.", rich_help_panel=MACHINE),
    ] = PrecisionName.bfloat16,
    device: Annotated[str, typer.Option(help="auto or cpu.", rich_help_panel=MACHINE)] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads; unset leaves it to PyTorch.", rich_help_panel=MACHINE)] = None,
    compile_: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Fuse layer self-attention with torch.compile: a fifth faster on CPUs, needs g++.",
            rich_help_panel=MACHINE,
        ),
    ] = False,
    log_every: Annotated[int, typer.Option(help="Steps between lines of log.jsonl.", rich_help_panel=MACHINE)] = 10,
    checkpoint_steps: Annotated[
        int | None, typer.Option(help="Steps between checkpoints, besides --checkpoint-minutes.", rich_help_panel=MACHINE)
    ] = None,
    checkpoint_minutes: Annotated[
        float, typer.Option(help="Minutes between checkpoints; two are kept.", rich_help_panel=MACHINE)
    ] = 10.0,
    valid_every: Annotated[int, typer.Option(help="Steps between validations.", rich_help_panel=MACHINE)] = 500,
    valid_tokens: Annotated[int, typer.Option(help="Tokens of --valid that are used.", rich_help_panel=MACHINE)] = 100_000,
    cache: Annotated[
        Path | None, typer.Option(help="Tokenised corpora are kept here (default ~/.cache/moaserve).", rich_help_panel=MACHINE)
    ] = None,
) -> None:
    """Train a Mixture-of-Attentions drafter for a target (arXiv 2410.03804).

    Defaults are the paper's; sizes left out follow the authors' proportions for this target. Ctrl-C saves and stops; the same
    command with --resume goes on exactly where it was.

    Example: moaserve train --target ./my-model --data chats.jsonl.gz --valid others.jsonl.gz --out runs/drafter --epochs 3

    Several processes: torchrun --nproc_per_node 2 -m training --target … (the same options). On a CPU that others use too, one
    process a core with --threads 1 is much faster than one process with several threads.
    """
    from models.errors import CheckpointError
    from training.config import TrainConfig, default_cache
    from training.errors import TrainingError, TrainingInterrupted
    from training.run import train

    try:
        folder = train(
            TrainConfig(
                target=target,
                data=data,
                out=out,
                valid=valid,
                init_from=init_from,
                regenerate=regenerate,
                regenerate_temperature=regenerate_temperature,
                lsa_kv_heads=lsa_kv_heads,
                lsa_mlp=lsa_mlp,
                sa_kv_heads=sa_kv_heads,
                sa_mlp=sa_mlp,
                ca_kv_heads=ca_kv_heads,
                ca_mlp=ca_mlp,
                layers_inferred=layers_inferred,
                draft_block=draft_block,
                draft_block_mlp=draft_block_mlp,
                draft_vocabulary=draft_vocabulary,
                kl_weight=kl_weight,
                feature_weight=feature_weight,
                target_temperature=target_temperature,
                min_interval=min_interval,
                max_interval=max_interval,
                staircase_until=staircase_until,
                lr=lr,
                warmup=warmup,
                schedule=schedule.value,
                weight_decay=weight_decay,
                beta2=beta2,
                clip=clip,
                batch_tokens=batch_tokens,
                accumulate=accumulate,
                max_length=max_length,
                epochs=epochs,
                max_steps=max_steps,
                max_minutes=max_minutes,
                dtype=dtype.value,
                device=device,
                seed=seed,
                threads=threads,
                compile=compile_,
                log_every=log_every,
                checkpoint_steps=checkpoint_steps,
                checkpoint_minutes=checkpoint_minutes,
                valid_every=valid_every,
                valid_tokens=valid_tokens,
                cache=cache or default_cache(),
                resume=resume,
            )
        )
    except TrainingInterrupted as interrupted:
        typer.echo(str(interrupted), err=True)
        raise typer.Exit(128 + signal.SIGINT) from None
    except (TrainingError, CheckpointError) as error:
        typer.echo(f"moaserve train: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(f"trained drafter in {folder}")


app = typer.Typer(add_completion=False)
app.command("train")(train_command)
