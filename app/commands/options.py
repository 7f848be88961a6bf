"""What the sub-commands share: the engine's options, and settings made of options with errors that name the option."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from app.settings import HttpSettings, Settings
    from speculative.config import EngineConfig

S = TypeVar("S", bound="HttpSettings")

ENGINE = "Model and engine"
SPECULATION = "Speculation"


def writable_folder(param: typer.CallbackParam, folder: Path | None) -> Path | None:
    """An option's value; ends the program, before anything is done for it, where results could not be written to this folder."""
    from training.places import unusable

    if folder is not None and (reason := unusable(folder)):
        fail(f"{param.opts[0]} {folder}: {reason}", code=2)
    return folder


def writable_file(param: typer.CallbackParam, path: Path | None) -> Path | None:
    """The same of a file."""
    from training.places import unusable

    if path is None:
        return None
    if path.is_dir():
        fail(f"{param.opts[0]} {path} is a folder, and a file is wanted", code=2)
    reason = unusable(path.parent) if not os.path.exists(path) else None if os.access(path, os.W_OK) else "it cannot be written to"
    if reason is not None:
        fail(f"{param.opts[0]} {path}: {reason}", code=2)
    return path


ResultFile = Annotated[Path | None, typer.Option(help="Write all figures here as JSON.", callback=writable_file)]
Config = Annotated[Path | None, typer.Option(help="TOML file with any of these settings, e.g. max_num_seqs = 8.")]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error. (default: info)")]
Model = Annotated[
    str | None,
    typer.Option(
        help="'bundled', a folder or a hub id such as Qwen/Qwen2.5-0.5B-Instruct, perhaps with @revision. (default: bundled)",
        rich_help_panel=ENGINE,
    ),
]
DType = Annotated[
    str | None, typer.Option(help="auto, float32 or bfloat16. (default: auto: what is fast here)", rich_help_panel=ENGINE)
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ... (default: auto)", rich_help_panel=ENGINE)]
MaxModelLen = Annotated[
    int | None,
    typer.Option(help="Most tokens of one sequence, prompt and output. (default: the model's limit)", rich_help_panel=ENGINE),
]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option(
        help="Sequences decoded together; others wait. (default: 32, or fewer where memory ends before)", rich_help_panel=ENGINE
    ),
]
PrefillChunk = Annotated[
    int | None,
    typer.Option(
        help="Most prompt tokens run per step; beside running streams fewer are, so that they keep flowing. (default: 512)",
        rich_help_panel=ENGINE,
    ),
]
PrefixCacheTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens of earlier texts kept, so that prompts which begin alike, and later turns, are not read again; 0: none. "
        "(default: half of max-num-seqs times max-model-len)",
        rich_help_panel=ENGINE,
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        help="Most memory, such as 2GiB or 1500MB: of the process on a CPU, of the device on a GPU. Less is kept of earlier texts, "
        "and unless --max-num-seqs is given fewer sequences are decoded together, until all fits. (default: no limit where "
        "--max-num-seqs is given, else what is free)",
        rich_help_panel=ENGINE,
    ),
]
NumThreads = Annotated[
    int | None,
    typer.Option(help="CPU threads, of each process where there are several. (default: PyTorch's choice)", rich_help_panel=ENGINE),
]
Compile = Annotated[
    str | None,
    typer.Option(
        help="Compile the networks for this CPU: auto, on or off. Takes half a minute to some minutes, once; decoding is then some "
        "three times faster for small models. On a GPU steps are recorded as CUDA graphs, unless it is off. "
        "(default: auto: where there is a C++ compiler and the model is small, or where our operators are for it)",
        rich_help_panel=ENGINE,
    ),
]
TensorParallelSize = Annotated[
    int | None,
    typer.Option(
        help="Processes that share the model, one a GPU: for models larger than one GPU. It must divide the model's number of KV "
        "heads. (default: 1)",
        rich_help_panel=ENGINE,
    ),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        help="auto, none, ngram, a folder or a hub id. (default: auto: MoA for the bundled model, else ngram)",
        rich_help_panel=SPECULATION,
    ),
]
DraftPolicy = Annotated[
    str | None,
    typer.Option(
        help="adaptive: draft what makes the most tokens a second, by what steps cost on this machine (measured at the start) and "
        "by how drafts fare, and nothing where that is faster; fixed: the same limits at every step. (default: adaptive)",
        rich_help_panel=SPECULATION,
    ),
]
DraftDepth = Annotated[int | None, typer.Option(help="Most tokens drafted ahead. (default: 8)", rich_help_panel=SPECULATION)]
DraftBreadth = Annotated[int | None, typer.Option(help="Candidates kept at each depth. (default: 4)", rich_help_panel=SPECULATION)]
DraftMinReach = Annotated[
    float | None,
    typer.Option(
        help="Stop drafting where all kept candidates together are less likely than this; 0: never. (default: where a level costs "
        "more than it brings; with --draft-policy fixed 0.2)",
        rich_help_panel=SPECULATION,
    ),
]
DraftTemperature = Annotated[
    float | None,
    typer.Option(
        help="Below 1, the drafter's favourites count for more: deeper, narrower trees. (default: 1: as it was trained)",
        rich_help_panel=SPECULATION,
    ),
]
DraftLookup = Annotated[
    int | None,
    typer.Option(
        help="Where the last so many tokens stand earlier in the text, draft what followed them there too: alone where that "
        "foretells as much as the drafter does, else in one tree with its drafts; 0: never. (default: 2)",
        rich_help_panel=SPECULATION,
    ),
]
DraftWindow = Annotated[
    int | None,
    typer.Option(
        help="How many of a prompt's last tokens a MoA or EAGLE drafter reads, 0: all. Reading more costs time after the first "
        "token, and bandwidth where clients draft. (default: 64 by a MoA drafter on a CPU and for clients, else all)",
        rich_help_panel=SPECULATION,
    ),
]
DraftNodes = Annotated[
    int | None,
    typer.Option(
        help="Candidates verified in one pass of the model, as many as --draft-depth or more. (default: 15)",
        rich_help_panel=SPECULATION,
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help='JSONL (or .jsonl.gz) of {"messages": …}, {"turns": …} or {"prompt": …} lines. (default: 64 bundled prompts)',
    ),
]
MaxPromptTokens = Annotated[int, typer.Option(min=1, help="Longer prompts are left out.")]


def load_settings(**options: Any) -> Settings:
    """Settings of the options given (None: not given), the environment and the file; ends the program where they are wrong."""
    from app.settings import Settings

    return settings_of(Settings, options)


def settings_of(kind: type[S], options: Mapping[str, Any]) -> S:
    """The same of any kind of settings."""
    from pydantic import ValidationError

    from app.settings import SettingsError

    given = {name: value for name, value in options.items() if value is not None}
    try:
        return kind(**given)
    except SettingsError as error:
        fail(str(error), code=2)
    except ValidationError as error:
        fail("\n".join(_explain(problem, given) for problem in error.errors()), code=2)


def engine_config(parameters: dict[str, Any]) -> EngineConfig:
    """What a measuring command's parameters say of the engine, by name; its other parameters are passed over.

    Each prompt is read anew, however often it comes.
    """
    from speculative.config import EngineConfig

    names = [field.name for field in fields(EngineConfig) if field.name in parameters]
    return load_settings(**{"prefix_cache_tokens": 0} | {name: parameters[name] for name in names}).engine_config()


def json_object(option: str, text: str | None) -> dict[str, Any] | None:
    """An option's value as a JSON object, None where it was not given; ends the program where it is something else."""
    import json

    try:
        value = None if text is None else json.loads(text)
    except ValueError as error:
        fail(f"{option}: {error} (got {text!r})", code=2)
    if not (value is None or isinstance(value, dict)):
        fail(f"{option} must be a JSON object (got {text!r})", code=2)
    return value


def fail(message: str, *, code: int = 1) -> NoReturn:
    """Print one clear line and end the program."""
    typer.echo(f"moaserve: error: {message}", err=True)
    raise typer.Exit(code)


def fail_if_interrupted(done: int, asked: int, what: str) -> None:
    """End the program where fewer prompts, rounds or the like were measured than was asked for."""
    if done < asked:
        fail(f"it was interrupted after {done} of {asked} {what}")


def _explain(problem: ErrorDetails, given: dict[str, Any]) -> str:
    """A problem, under the name by which the user set the value: an option, a variable or a key of the file."""
    message = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return message
    name = str(problem["loc"][0])
    variable = f"MOASERVE_{name.upper()}"
    if problem["type"] == "extra_forbidden":
        return f"unknown setting {name!r} in the config file"
    if problem["type"] == "missing":
        return f"--{name.replace('_', '-')} must be given (or {variable}, or {name} in the config file)"
    if name in given:
        source = "--" + name.replace("_", "-")
    else:
        source = variable if variable in os.environ else f"{name} in the config file"
    value = problem["input"]
    return f"{source}: {message} (got {str(value) if isinstance(value, Path) else value!r})"


def named(drafters: list[str]) -> dict[str, str]:
    """NAME=FOLDER, or folders alone, as folders by name; ends the program where a part is missing or two have the same name."""
    pairs = [
        (name, value) if separator else (Path(name).name or name, name)
        for name, separator, value in (each.partition("=") for each in drafters)
    ]
    for given, pair in zip(drafters, pairs, strict=True):
        if not all(pair):
            fail(f"--drafter {given}: write NAME=FOLDER, or a folder alone", code=2)
    if len(dict(pairs)) < len(pairs):
        fail("--drafter: two have the same name; write NAME=FOLDER", code=2)
    return dict(pairs)
