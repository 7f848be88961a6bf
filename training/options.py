"""Options that every training command has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from training import choices

RUN, SIZES, LOSS, STEPS, MACHINE = "Run", "Sizes", "Loss", "Optimisation", "Machine and records"
"""Panels of --help."""


def named(text: str) -> Path:
    """A path that an option names, which an empty text does not: as a path, that would be the working directory."""
    if not text.strip():
        raise typer.BadParameter("it is empty: say where to write")
    return Path(text)


PLACE = "<path>"
"""How --help shows such an option."""

Data = Annotated[
    str | None,
    typer.Option(
        help='Conversations: a .jsonl or .jsonl.gz file of {"messages": […], "tools": […]?}, or a datasets name with a '
        "messages column (owner/name or owner/name:split).",
        rich_help_panel=RUN,
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        help="Folder for the model, log.jsonl, training.json and checkpoints.", parser=named, metavar=PLACE, rich_help_panel=RUN
    ),
]
Valid = Annotated[str | None, typer.Option(help="Held-out conversations, same forms as --data.", rich_help_panel=RUN)]
Epochs = Annotated[float | None, typer.Option(help="Stop after this many passes over the data (paper: 40).", rich_help_panel=RUN)]
MaxSteps = Annotated[int | None, typer.Option(help="Stop after this many updates.", rich_help_panel=RUN)]
MaxMinutes = Annotated[
    float | None, typer.Option(help="Stop after this long, earlier runs that are resumed included.", rich_help_panel=RUN)
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.", rich_help_panel=RUN)]

Optimizer = Annotated[
    choices.Optimizer,
    typer.Option(
        help="adamw, or muon for the layers' matrices and AdamW for all else.",
        rich_help_panel=STEPS,
    ),
]
LearningRate = Annotated[
    float, typer.Option(help="Peak learning rate (paper: 3e-5; small models want 1e-3).", rich_help_panel=STEPS)
]
Warmup = Annotated[int, typer.Option(help="Steps of linear warm-up (paper: 50).", rich_help_panel=STEPS)]
Schedule = Annotated[
    choices.Schedule,
    typer.Option(help="After the warm-up (paper: constant). The others reach 0 at the nearest limit.", rich_help_panel=STEPS),
]
WeightDecay = Annotated[float, typer.Option(help="AdamW's weight decay (paper: 0).", rich_help_panel=STEPS)]
Beta2 = Annotated[float, typer.Option(help="AdamW's second moment decay.", rich_help_panel=STEPS)]
Clip = Annotated[float, typer.Option(help="Largest gradient norm (paper: 1).", rich_help_panel=STEPS)]
BatchTokens = Annotated[
    int,
    typer.Option(help="Tokens a batch, padding included; a process runs one at a time (paper: 32 × 2048).", rich_help_panel=STEPS),
]
Accumulate = Annotated[
    int, typer.Option(help="Batches an update, divided among all processes: a multiple of their number.", rich_help_panel=STEPS)
]
MaxLength = Annotated[int, typer.Option(help="Longer conversations are cut here (paper: 2048).", rich_help_panel=STEPS)]
Seed = Annotated[int, typer.Option(help="Same seed, same weights.", rich_help_panel=STEPS)]

DType = Annotated[
    choices.PrecisionOrAuto,
    typer.Option(
        help="Compute type; master weights are float32 with any. auto: bfloat16 on GPUs and on CPUs that multiply it, else "
        "float32, which is several times as fast there.",
        rich_help_panel=MACHINE,
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda; CUDA_VISIBLE_DEVICES chooses among GPUs.", rich_help_panel=MACHINE)]
Threads = Annotated[int | None, typer.Option(help="CPU threads; unset leaves it to PyTorch.", rich_help_panel=MACHINE)]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Fuse what gains most with torch.compile, and on CPUs that multiply bfloat16 use our own attention for targets; "
        "needs g++ on a CPU.",
        rich_help_panel=MACHINE,
    ),
]
LogEvery = Annotated[int, typer.Option(help="Steps between lines of log.jsonl.", rich_help_panel=MACHINE)]
CheckpointSteps = Annotated[
    int | None, typer.Option(help="Steps between checkpoints, besides --checkpoint-minutes.", rich_help_panel=MACHINE)
]
CheckpointMinutes = Annotated[float, typer.Option(help="Minutes between checkpoints; two are kept.", rich_help_panel=MACHINE)]
ValidEvery = Annotated[int, typer.Option(help="Steps between validations.", rich_help_panel=MACHINE)]
ValidTokens = Annotated[int, typer.Option(help="Tokens of --valid that are used.", rich_help_panel=MACHINE)]
Cache = Annotated[
    Path | None, typer.Option(help="Tokenised corpora are kept here (default ~/.cache/moaserve).", rich_help_panel=MACHINE)
]


Regenerate = Annotated[
    int | None,
    typer.Option(
        help="Train on this many of the conversations, every assistant turn written anew by the target: what it writes is what "
        "the drafter will be asked to predict. (default: all, as they are)",
        rich_help_panel=RUN,
    ),
]
RegenerateTemperature = Annotated[
    float, typer.Option(help="Temperature at which the target writes them; 0 is greedy.", rich_help_panel=RUN)
]
ShardTarget = Annotated[
    bool,
    typer.Option(
        "--shard-target",
        help="Spread the target's layers over the processes (FSDP), for one that is larger than a GPU.",
        rich_help_panel=MACHINE,
    ),
]


def settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A command's arguments as a configuration's."""
    from training.run_config import fastest_precision

    given = {name.rstrip("_"): value for name, value in arguments.items() if (name, value) != ("cache", None)}
    return given | {"dtype": fastest_precision(given["device"])} if given["dtype"] == "auto" else given


def check_installed(command: str) -> None:
    """End the command with a message where what it trains with is missing."""
    if find_spec("accelerate") is None:
        typer.echo(f"moaserve {command} needs accelerate, which a server does without: pip install 'moaserve[train]'", err=True)
        raise typer.Exit(2)


def say(text: str) -> None:
    """Print a line, of several processes in one."""
    from training import processes

    if processes.is_main():
        typer.echo(text)


def run(command: str, work: Callable[[], Path]) -> Path:
    """Do the work; what the user can put right ends the command with a message instead of a trace."""
    from models.errors import CheckpointError
    from training import processes
    from training.errors import TrainingError, TrainingInterrupted

    try:
        done = work()
        processes.leave()
        return done
    except TrainingInterrupted as interrupted:
        typer.echo(str(interrupted), err=True)
        raise typer.Exit(128 + interrupted.number) from None
    except (TrainingError, CheckpointError, OSError) as error:
        typer.echo(f"moaserve {command}: {error}", err=True)
        raise typer.Exit(2) from None
