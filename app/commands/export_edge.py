"""`moaserve export-edge`: the bundle that an edge drafts from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from app.commands import loading, options
from training.options import PLACE, named

MEGABYTE = 1e6


def export_edge(
    out: Annotated[Path, typer.Option(help="Folder to write to: a new one, or an empty one.", parser=named, metavar=PLACE)],
    model: Annotated[str, typer.Option(help="The target: 'bundled', a folder or a hub id.")] = "bundled",
    drafter: Annotated[
        str | None,
        typer.Option(
            help="A Mixture-of-Attentions drafter without borrowed layers (N = 0): 'bundled', a folder or a hub id. "
            "(default: bundled, with the bundled model)"
        ),
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"],
        typer.Option(help="Type of the weights; with --quantization, of the few that stay as they are."),
    ] = "bfloat16",
    quantization: Annotated[
        Literal["int8"] | None,
        typer.Option(help="int8 takes half of bfloat16's bytes, on disk and in memory. (default: none)"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a bundle that --out holds already.")] = False,
) -> None:
    """Write what an edge needs to draft for a server: drafter, embeddings, LM head, tokenizer and defaults, no target layers.

    The server that the edge will ask must run the same target and drafter; the bundle says which.

    For example:

      moaserve export-edge --out edge

      moaserve export-edge --model path/or/hub-id --drafter runs/drafter --quantization int8 --out edge
    """
    if drafter is None:
        if model != "bundled":
            options.fail(f"--drafter: name the one for --model {model}", code=2)
        drafter = "bundled"
    with loading.clear_errors():
        from speculative import edge_export

        done = edge_export.export_edge(model, drafter, out, dtype=dtype, quantization=quantization, force=force)
    stored = dtype if quantization is None else f"{quantization} (the rest {dtype})"
    whole = done.target_weight_bytes + done.drafter_weight_bytes
    files = "1 file" if done.num_weight_files == 1 else f"{done.num_weight_files} files"
    typer.echo(f"{out}: {done.name} and its drafter for an edge, {stored}, pair {done.fingerprint}")
    typer.echo(
        f"  weights   {_megabytes(done.weight_bytes)} in {files}, {done.weight_bytes / whole:.0%} of what they were made of:"
    )
    typer.echo(f"            target {_megabytes(done.target_weight_bytes)}, drafter {_megabytes(done.drafter_weight_bytes)}")
    typer.echo(f"  the rest  {_megabytes(done.other_bytes)} (tokenizer, chat template, defaults)")


def _megabytes(size: int) -> str:
    return f"{size / MEGABYTE:.2f} MB"
