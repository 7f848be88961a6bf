"""`moaserve export-gguf`: a target as one file that llama.cpp reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from app.commands import loading, options
from training.options import PLACE, named


def export_gguf(
    out: Annotated[Path, typer.Option(help="File to write, such as target.gguf.", parser=named, metavar=PLACE)],
    model: Annotated[str, typer.Option(help="The target: 'bundled', a folder or a hub id.")] = "bundled",
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="Type of the matrices; vectors are float32.")
    ] = "bfloat16",
    force: Annotated[bool, typer.Option("--force", help="Replace the file, if it is there already.")] = False,
) -> None:
    """Write a target with its tokenizer and chat template as a GGUF file, which llama.cpp serves: the same weights, not quantized.

    For Llama, Mistral, Qwen2 and Qwen3 with byte-level BPE tokenizers that llama.cpp splits texts alike with; others are refused.

    For example:

      moaserve export-gguf --out target.gguf

      moaserve export-gguf --model path/or/hub-id --dtype float32 --out target.gguf
    """
    with loading.clear_errors():
        from models import gguf_export

        try:
            done = gguf_export.export_gguf(model, out, dtype=dtype, force=force)
        except ModuleNotFoundError as error:
            if error.name != "gguf":
                raise
            options.fail("no gguf: pip install gguf, or 'moaserve[peers]', which has llama.cpp too")
    typer.echo(
        f"{out}: {done.name} for llama.cpp, {dtype}, architecture {done.architecture}, pre-tokenizer {done.pre_tokenizer}, "
        f"{done.num_tensors} tensors, {done.size / 1e6:.2f} MB"
    )
