"""The command `moaserve`. Each sub-command has a file in app/commands and imports what is heavy only when it runs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from app.commands.bench import bench
from app.commands.bench_alone import alone
from app.commands.bench_capacity import capacity
from app.commands.bench_costs import costs
from app.commands.bench_fairness import fairness
from app.commands.bench_gateway import gateway
from app.commands.bench_gpu import gpu
from app.commands.bench_network import network
from app.commands.bench_peers import peers
from app.commands.bench_replicas import replicas
from app.commands.bench_servers import lossless, turns
from app.commands.bench_serving import serving
from app.commands.bench_soak import soak
from app.commands.chat import chat
from app.commands.edge import edge
from app.commands.evaluate import evaluate
from app.commands.export_edge import export_edge
from app.commands.export_gguf import export_gguf
from app.commands.ray import ray
from app.commands.serve import serve
from app.commands.train import train
from training.activations.command import activations_command
from training.pretrain import pretrain_command

cli = typer.Typer(
    name="moaserve",
    help="OpenAI-compatible LLM server made faster by Mixture-of-Attentions speculative decoding, with the same output.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cli.command()(serve)
cli.command()(ray)
cli.command()(edge)
cli.command()(chat)
cli.command("train")(train)
cli.command("activations")(activations_command)
cli.command("pretrain")(pretrain_command)
cli.command("eval")(evaluate)
cli.command("export-edge")(export_edge)
cli.command("export-gguf")(export_gguf)
bench.command()(alone)
bench.command()(lossless)
bench.command()(turns)
bench.command()(network)
bench.command()(serving)
bench.command()(gateway)
bench.command()(fairness)
bench.command()(soak)
bench.command()(costs)
bench.command()(capacity)
bench.command()(gpu)
bench.command()(peers)
bench.command()(replicas)
cli.add_typer(bench)


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(f"moaserve {version('moaserve')}")
        except PackageNotFoundError:  # run from a checkout that is not installed
            typer.echo("moaserve (not installed)")
        raise typer.Exit


@cli.callback()
def _moaserve(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the console script."""
    cli()


if __name__ == "__main__":
    main()
