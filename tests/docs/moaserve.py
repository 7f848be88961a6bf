"""`moaserve` as the pages' commands get it: the program itself, with less to do.

`serve` reads its options, and ends where it would load the model: one server answers all pages. What measures or trains gets a
few small prompts or steps by options after the page's own, the last of which counts.
"""

from __future__ import annotations

import os
import sys

import typer

from app.cli import cli, main
from app.commands.options import load_settings

PROMPTS = ["--num-prompts", "1", "--max-tokens", "8"]
TRAINING = ["--max-steps", "1", "--batch-tokens", "256", "--max-length", "64", "--threads", "1", "--device", "cpu"]
LESS = {
    "train": [*TRAINING, "--draft-vocabulary", "64", "--valid-tokens", "64"],
    "activations": ["--batch-tokens", "256", "--max-length", "64", "--threads", "1", "--device", "cpu", "--valid-tokens", "64"],
    "pretrain": [*TRAINING, "--valid-tokens", "64"],
    "eval": PROMPTS,
    "bench offline": [*PROMPTS, "--no-transformers"],
    "bench lossless": PROMPTS,
    "bench predictions": ["--num-prompts", "1", "--max-tokens", "16"],
    "bench answers": PROMPTS,
    "bench turns": ["--conversations", "1", "--tokens", "64"],
    "bench serving": ["--num-prompts", "2", "--max-tokens", "4", "--seconds", "0", "--num-requests", "2", "--rounds", "1"],
    "bench gateway": ["--rounds", "1", "--num-requests", "2", "--concurrency", "2", "--max-tokens", "4", "--compile", "off"],
    "bench fairness": ["--streams", "2", "--prompt-tokens", "300", "--repeats", "1", "--settling", "0.2", "--compile", "off"],
    "bench gpu": ["--shape", "tiny", "--batch", "1", "--num-prompts", "1", "--max-tokens", "4", "--device", "cpu"],
    "bench costs": ["--batches", "1", "--steps", "2", "--repeats", "1", "--conversations", "2", "--requests", "1"],
    "bench capacity": ["--seconds", "5", "--sessions", "1000"],
    "bench replicas": ["--parts", "chats", "--replicas", "2", "--chats", "2", "--max-tokens", "16"],
    "bench watching": ["--rounds", "2", "--num-requests", "2", "--max-tokens", "4", "--compile", "off"],
}
ONCE = {"eval": ["--shape", "tree", "--temperature", "0"]}
"""For options that add up, where the page gives none of them."""
SERVER = {"bench lossless": "--base-url", "bench turns": "--base-url"}
"""How a command is told of the server, where it would take the default address."""


def with_less_to_do(arguments: list[str]) -> list[str]:
    command = " ".join(arguments[: 2 if arguments[:1] == ["bench"] else 1])
    more = list(LESS.get(command, ()))
    for option, value in zip(*[iter(ONCE.get(command, ()))] * 2, strict=True):
        more += [] if option in arguments else [option, value]
    if command in SERVER and SERVER[command] not in arguments:
        more += [SERVER[command], os.environ["SERVER_OF_THE_PAGES"]]
    return [*arguments, *more]


def read_options_of_serve(arguments: list[str]) -> None:
    group = typer.main.get_group(cli)
    command = group.get_command(group.make_context("moaserve", ["serve"]), "serve")
    assert command is not None
    with command.make_context("moaserve serve", arguments) as context:
        settings = load_settings(**context.params)
    print(f"would serve {settings.model} on {settings.host} port {settings.port}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"] and not {"-h", "--help"} & set(sys.argv):
        try:
            read_options_of_serve(sys.argv[2:])
        except typer.Exit as end:
            sys.exit(end.exit_code)
    else:
        sys.argv[1:] = with_less_to_do(sys.argv[1:])
        main()
