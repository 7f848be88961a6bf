"""`moaserve train`: the options, and what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from training import options
from training.choices import Method, TokenLossKind
from training.options import LOSS, RUN, SIZES


def train_command(
    target: Annotated[
        str, typer.Option(help="Target model: a folder, a hub id or 'bundled'. It stays frozen.", rich_help_panel=RUN)
    ],
    out: options.Out,
    data: options.Data = None,
    valid: options.Valid = None,
    epochs: options.Epochs = None,
    max_steps: options.MaxSteps = None,
    max_minutes: options.MaxMinutes = None,
    resume: options.Resume = False,
    method: Annotated[
        Method,
        typer.Option(
            help="What kind of drafter: moa, or one to compare it with (eagle2, eagle3, a small independent language model).",
            rich_help_panel=RUN,
        ),
    ] = "moa",
    init_from: Annotated[
        str | None,
        typer.Option(
            help="Start from this drafter, a folder, a hub id or (moa) 'bundled', instead of random weights; other widths of MLPs "
            "cut them to their strongest units or add new ones, and --draft-block adds a block.",
            rich_help_panel=RUN,
        ),
    ] = None,
    activations: Annotated[
        Path | None,
        typer.Option(
            help="Learn from what moaserve activations kept, text included, without running the target: in the place of --data.",
            rich_help_panel=RUN,
        ),
    ] = None,
    regenerate: options.Regenerate = None,
    regenerate_temperature: options.RegenerateTemperature = 0.0,
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
    without_entry: Annotated[
        bool,
        typer.Option(
            "--without-entry",
            help="The paper's drafter: drafts know the target through cross-attention and its layers' keys and values alone. "
            "(default: memory reads its final hidden state too, and drafts start from the newest memory)",
            rich_help_panel=SIZES,
        ),
    ] = False,
    paired: Annotated[
        bool,
        typer.Option(
            "--paired",
            help="Memory of a token reads the token and its neighbours too, drafts read the token before theirs, and a drafter "
            "learns to copy what stands in the text. Goes with --feature-weight 0 --staircase-until 0 --draws 5.",
            rich_help_panel=SIZES,
        ),
    ] = False,
    without_lsa: Annotated[
        bool,
        typer.Option("--without-lsa", help="For ablations: memory is the last layer's keys and values.", rich_help_panel=SIZES),
    ] = False,
    without_ca: Annotated[
        bool, typer.Option("--without-ca", help="For ablations: the newest memory instead of all.", rich_help_panel=SIZES)
    ] = False,
    draft_kv_heads: Annotated[
        int | None,
        typer.Option(help="eagle2, eagle3, independent: KV heads. (default: the target's)", rich_help_panel=SIZES),
    ] = None,
    draft_mlp: Annotated[
        int | None,
        typer.Option(
            help="eagle2, eagle3, independent: width of MLPs. (default: the target's; independent: 3 × hidden)",
            rich_help_panel=SIZES,
        ),
    ] = None,
    draft_layers: Annotated[
        int | None, typer.Option(help="independent: layers. (default: a quarter of the target's)", rich_help_panel=SIZES)
    ] = None,
    draft_hidden: Annotated[
        int | None,
        typer.Option(
            help="independent: width, a multiple of the target's head size. (default: half the target's)", rich_help_panel=SIZES
        ),
    ] = None,
    draft_vocabulary: Annotated[
        int | None,
        typer.Option(
            help="Draft only so many tokens, those that responses use most, and those a text has: cheaper levels. (default: all)",
            rich_help_panel=SIZES,
        ),
    ] = None,
    token_loss: Annotated[
        TokenLossKind,
        typer.Option(
            help="Loss on the next token: kl(target ‖ drafter) as in the paper, tv (total variation: the share of drafts that "
            "sampling rejects), or lk (−log of the share that it accepts, arXiv 2602.23881).",
            rich_help_panel=LOSS,
        ),
    ] = "kl",
    kl_weight: Annotated[
        float,
        typer.Option(
            help="Weight of that loss on the next token (paper: 0.1); eagle3 and independent have no other loss: it does nothing.",
            rich_help_panel=LOSS,
        ),
    ] = 0.1,
    feature_weight: Annotated[
        float,
        typer.Option(
            help="Weight of smooth-L1 on the target's final hidden state (paper: 1). moa and eagle2 alone.", rich_help_panel=LOSS
        ),
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
    draws: Annotated[
        int,
        typer.Option(
            help="How often verifications are simulated on each conversation for one pass of the target over it: every position is "
            "taught at that many depths (paper: 1).",
            rich_help_panel=LOSS,
        ),
    ] = 1,
    staircase_until: Annotated[
        float,
        typer.Option(
            help="Share of the run over which self-attention is weaned from seeing drafted tokens only (paper: 0.5; 0 is off).",
            rich_help_panel=LOSS,
        ),
    ] = 0.5,
    feature_noise: Annotated[
        float, typer.Option(help="eagle2: features get noise of up to this, either way (EAGLE: 0.1).", rich_help_panel=LOSS)
    ] = 0.1,
    unroll: Annotated[
        int, typer.Option(help="eagle3: draft steps on its own outputs, the first included; at most 16.", rich_help_panel=LOSS)
    ] = 5,
    optimizer: options.Optimizer = "adamw",
    lr: options.LearningRate = 3e-5,
    warmup: options.Warmup = 50,
    schedule: options.Schedule = "constant",
    weight_decay: options.WeightDecay = 0.0,
    beta2: options.Beta2 = 0.999,
    clip: options.Clip = 1.0,
    batch_tokens: options.BatchTokens = 8192,
    accumulate: options.Accumulate = 1,
    max_length: options.MaxLength = 2048,
    seed: options.Seed = 0,
    dtype: options.DType = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    shard_target: options.ShardTarget = False,
    compile_: options.Compile = False,
    log_every: options.LogEvery = 10,
    checkpoint_steps: options.CheckpointSteps = None,
    checkpoint_minutes: options.CheckpointMinutes = 10.0,
    valid_every: options.ValidEvery = 500,
    valid_tokens: options.ValidTokens = 100_000,
    cache: options.Cache = None,
) -> None:
    """Train a Mixture-of-Attentions drafter for a target (arXiv 2410.03804).

    Defaults are the paper's; sizes left out follow the authors' proportions for this target. Ctrl-C saves and stops; the same
    command with --resume goes on exactly where it was.

    Example: moaserve train --target ./my-model --data chats.jsonl.gz --valid others.jsonl.gz --out runs/drafter --epochs 3

    Several processes: accelerate launch --multi_gpu --num_processes 2 --no_python moaserve train --target … --accumulate 2
    trains the same drafter, on GPUs or a CPU's cores; there one process a core with --threads 1 is much faster than one process
    with several threads when others use them too.
    """
    given = options.settings(locals())
    options.check_installed("train")
    from training.config import TrainConfig
    from training.run import train

    folder = options.run("train", lambda: train(TrainConfig(**given)))
    options.say(f"trained drafter in {folder}")


app = typer.Typer(add_completion=False)
app.command("train")(train_command)
