"""`moaserve bench`: what is measured of running servers."""

from __future__ import annotations

from typing import Annotated

import httpx
import typer

from app.commands import loading, options


def lossless(
    base_url: Annotated[str, typer.Option(help="A running server; start it with --dtype float32.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str, typer.Option(help="The model that it serves: 'bundled', a folder or a hub id.")] = "bundled",
    prompts: options.Prompts = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="How many of them.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens generated per prompt.")] = 128,
    max_prompt_tokens: options.MaxPromptTokens = 1024,
    seed: Annotated[int, typer.Option(help="Which prompts are drawn; also the sampling seed.")] = 0,
) -> None:
    """Check a server's promise: the same text with speculation on and off, alone and in company, and as from transformers.

    Greedy text is compared with transformers' generate on the same weights in float32, sampled text with the same request sent
    with "speculative": false. Ends with exit code 1 when any text differs.

    For example, in two terminals:

      moaserve serve --dtype float32

      moaserve bench lossless
    """
    from benchmarks import lossless as checking
    from benchmarks.decoding import load_transformers
    from benchmarks.prompts import BUNDLED_PROMPTS, load_prompts

    with loading.clear_errors():
        tokenizer = loading.load_tokenizer(model)
        selected = load_prompts(prompts or BUNDLED_PROMPTS, tokenizer, count=num_prompts, max_tokens=max_prompt_tokens, seed=seed)
    with typer.progressbar(length=len(selected) * checking.TEXTS, label="comparing") as bar:
        try:
            results = checking.check(
                base_url,
                load_transformers(model, "float32", "cpu"),
                tokenizer,
                selected,
                max_tokens=max_tokens,
                seed=seed,
                progress=lambda: bar.update(1),
            )
        except httpx.HTTPError as error:
            options.fail(f"--base-url {base_url}: {error}")
    for result in results:
        typer.echo(result.line())
    raise typer.Exit(0 if all(result.ok for result in results) else 1)


def turns(
    base_url: Annotated[str, typer.Option(help="A running server.")] = "http://127.0.0.1:8000/v1",
    other_url: Annotated[
        str | None, typer.Option(help="Another one with the same model and the same --redis-url, to go on there too.")
    ] = None,
    model: Annotated[str, typer.Option(help="The model that they serve: 'bundled', a folder or a hub id.")] = "bundled",
    prompts: options.Prompts = None,
    conversations: Annotated[int, typer.Option(min=1, help="How many.")] = 20,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of text in the first turn.")] = 1000,
    seed: Annotated[int, typer.Option(help="Which prompts the texts are made of.")] = 0,
    json: options.ResultFile = None,
) -> None:
    """How soon a conversation's second turn begins: on a server that knows the first, on another one, and on one that does not.

    For example, with two servers on one Redis:

      moaserve serve --redis-url redis://localhost:6379

      moaserve serve --redis-url redis://localhost:6379 --port 8001

      moaserve bench turns --other-url http://127.0.0.1:8001/v1
    """
    import secrets

    from benchmarks.machine import provenance, write_json
    from benchmarks.prompts import BUNDLED_PROMPTS, load_prompts
    from benchmarks.turns import measure

    with loading.clear_errors():
        tokenizer = loading.load_tokenizer(model)
        selected = load_prompts(prompts or BUNDLED_PROMPTS, tokenizer, count=64, max_tokens=tokens, seed=seed)
    with typer.progressbar(length=conversations, label="asking", show_pos=True) as bar:
        try:
            figures = measure(
                base_url,
                other_url,
                tokenizer,
                selected,
                conversations=conversations,
                tokens=tokens,
                name=secrets.token_hex(8),
                progress=lambda: bar.update(1),
            )
        except httpx.HTTPError as error:
            options.fail(f"{base_url}, {other_url}: {error}" if other_url else f"--base-url {base_url}: {error}")
    for one in figures:
        typer.echo(one.line())
    typer.echo(provenance().line())
    if json is not None:
        write_json({"model": model, "seed": seed, "tokens": tokens, "figures": [one.as_dict() for one in figures]}, json)
