"""`moaserve bench gpu`."""

from __future__ import annotations

import gc
from typing import Annotated

import typer

from app.commands import loading, options, tables


def gpu(
    shape: Annotated[
        list[str] | None, typer.Option(help="8b, 1b or tiny. Give it again for more. (default: 8b and 1b; without a GPU tiny)")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Texts at once. Give it again for more. (default: 1, 8 and 32)")
    ] = None,
    nodes: Annotated[
        list[int] | None,
        typer.Option(min=8, help="Nodes verified of each text. Give it again for more. (default: as many as servers verify)"),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=0, help="Prompts that the bundled pair then decodes; 0: none.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens generated for each.")] = 128,
    prompts: options.Prompts = None,
    seed: Annotated[int, typer.Option(help="Which prompts are drawn.")] = 0,
    json: options.ResultFile = None,
    dtype: options.DType = None,
    device: options.Device = None,
) -> None:
    """Steps of large models beside the least that their memory allows, and the bundled pair. Downloads nothing.

    Weights are random: what a step costs does not depend on them. Every step is taken twice, launched one operation after another
    and as a recorded CUDA graph. The least that a verification takes is to read its weights, keys and values once.

    For example:

      moaserve bench gpu --json gpu.json

      moaserve bench gpu --shape 8b --batch 1 --nodes 15 --nodes 31 --num-prompts 0
    """
    config = options.engine_config({"dtype": dtype, "device": device, "max_num_seqs": 1})
    import json as writing

    from benchmarks import gpu as measuring
    from benchmarks import offline
    from benchmarks.machine import write_json
    from benchmarks.prompts import BUNDLED_PROMPTS, load_prompts
    from speculative.placement import torch_device, torch_dtype

    with loading.clear_errors():
        where = torch_device(config.device)
    kind, cuda = torch_dtype(config.dtype, where, compiled=False), where.type == "cuda"
    shapes, batches, counts = shape or (["8b", "1b"] if cuda else ["tiny"]), batch or [1, 8, 32], nodes or [config.draft_nodes]
    if unknown := [name for name in shapes if name not in measuring.SHAPES]:
        options.fail(f"--shape {unknown[0]}: there are {', '.join(measuring.SHAPES)}")
    speed = measuring.bandwidth(where, 1024 if cuda else 64)
    typer.echo(f"Memory is copied at {speed / 1e9:.0f} GB/s.")
    results = []
    with typer.progressbar(length=2 * len(shapes) * len(batches) * len(counts), label="measuring", show_pos=True) as bar:
        for name in shapes:
            asked = measuring.SHAPES[name], batches, counts, where, kind, speed
            try:
                results.append(measuring.measure_shape(*asked, progress=lambda: bar.update(1)))
            except measuring.NoRoomError:
                options.fail(f"--shape {name}: there is no room for it with {max(batches)} texts; try fewer (--batch 1)")
            gc.collect()
    for measured in results:
        tables.print_gpu(measured)
    figures = {"bytes_per_second": speed, "dtype": str(kind), "shapes": [measured.as_dict() for measured in results]}
    if num_prompts:
        with loading.clear_errors():
            engine, tokenizer = loading.load_engine(config)
            most = engine.info.max_model_len - max_tokens
            selected = load_prompts(prompts or BUNDLED_PROMPTS, tokenizer, count=num_prompts, max_tokens=most, seed=seed)
        with typer.progressbar(length=len(selected), label="decoding", show_pos=True) as bar:
            pair = offline.run_offline(
                engine, config, selected, max_tokens=max_tokens, reference=None, progress=lambda: bar.update(1)
            )
        tables.print_offline(pair)
        figures["bundled"] = writing.loads(pair.to_json())
    if json is not None:
        write_json(figures, json)
    if num_prompts:
        options.fail_if_interrupted(len(pair.prompts), len(selected), "prompts")
