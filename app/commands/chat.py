"""`moaserve chat`: talk to a model in a terminal."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands import http_options, options

if TYPE_CHECKING:
    from app.commands.backends import Backend

HELP = "/reset forgets the conversation, /quit ends (so does Ctrl-D); Ctrl-C stops an answer."


def chat(
    url: Annotated[
        str | None, typer.Option(help="A running server, e.g. http://127.0.0.1:8000. (default: load the model right here)")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Its key.", show_envvar=True)] = None,
    system: Annotated[str | None, typer.Option(help="System message to begin with.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer.", min=1)] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0: always the likeliest token. (default: the model's)", min=0, max=2)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampled answers repeatable.")] = None,
    speculative: Annotated[
        bool | None,
        typer.Option(
            help="--no-speculative decodes plainly: same answers, slower. --speculative drafts even where that is slower."
        ),
    ] = None,
    chat_template: http_options.ChatTemplate = None,
    chat_template_kwargs: http_options.ChatTemplateKwargs = None,
    config: options.Config = None,
    model: options.Model = None,
    dtype: options.DType = None,
    device: options.Device = None,
    max_model_len: options.MaxModelLen = None,
    num_threads: options.NumThreads = None,
    compile: options.Compile = None,
    drafter: options.Drafter = None,
    draft_policy: options.DraftPolicy = None,
    draft_depth: options.DraftDepth = None,
    draft_breadth: options.DraftBreadth = None,
    draft_nodes: options.DraftNodes = None,
    draft_min_reach: options.DraftMinReach = None,
    draft_temperature: options.DraftTemperature = None,
    draft_lookup: options.DraftLookup = None,
    draft_window: options.DraftWindow = None,
) -> None:
    """Talk to a model. Each answer ends with its acceptance length (τ) and speed.

    In the conversation, /reset forgets what was said and /quit ends; Ctrl-C stops an answer. Lines may also be piped in.

    For example:

      moaserve chat --temperature 0

      moaserve chat --url http://127.0.0.1:8000

      echo "What is 12 times 7?" | moaserve chat
    """
    engine_options = {
        "chat_template": chat_template,
        "chat_template_kwargs": chat_template_kwargs,
        "config": config,
        "model": model,
        "dtype": dtype,
        "device": device,
        "max_model_len": max_model_len,
        "num_threads": num_threads,
        "compile": compile,
        "drafter": drafter,
        "draft_policy": draft_policy,
        "draft_depth": draft_depth,
        "draft_breadth": draft_breadth,
        "draft_nodes": draft_nodes,
        "draft_min_reach": draft_min_reach,
        "draft_temperature": draft_temperature,
        "draft_lookup": draft_lookup,
        "draft_window": draft_window,
    }
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "speculative": speculative}
    request = {name: value for name, value in sampling.items() if value is not None}
    # Not asyncio.run: lines are read between answers, on the main thread, so that Ctrl-C reaches both.
    loop = asyncio.new_event_loop()
    try:
        backend = _open(loop, url, api_key, engine_options)
        try:
            _converse(loop, backend, system, request)
        finally:
            loop.run_until_complete(backend.close())
    finally:
        loop.close()


def _open(loop: asyncio.AbstractEventLoop, url: str | None, api_key: str | None, engine_options: dict[str, Any]) -> Backend:
    from app.commands import backends

    if url is not None:
        given = sorted("--" + name.replace("_", "-") for name, value in engine_options.items() if value is not None)
        if given:
            options.fail(f"{', '.join(given)} cannot be set together with --url: the server has its model already", code=2)
        return backends.ServerBackend(url, api_key)
    settings = options.load_settings(**engine_options)
    typer.echo(f"Loading {settings.model} ...", err=True)
    try:
        return loop.run_until_complete(backends.local_backend(settings))
    except backends.ChatError as error:
        options.fail(str(error))


def _converse(loop: asyncio.AbstractEventLoop, backend: Backend, system: str | None, request: dict[str, Any]) -> None:
    """Read, answer, repeat; an answer that fails leaves the conversation as it was."""
    from app.commands.backends import ChatError

    interactive = sys.stdin.isatty()
    if interactive:
        typer.echo(HELP)
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while (line := _read(interactive)) is not None and line != "/quit":
        if line == "/reset":
            messages = list(opening)
            typer.echo("(forgotten)")
        elif line.startswith("/"):
            typer.echo(HELP)
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                answer = _answer(loop, backend, {"messages": asked, **request})
            except ChatError as error:
                if not interactive:
                    options.fail(str(error))
                typer.echo(f"error: {error}", err=True)
            else:
                messages = [*asked, {"role": "assistant", "content": answer}]


def _read(interactive: bool) -> str | None:
    """The next line without its ends; None when there are no more."""
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        typer.echo()
        return None


def _answer(loop: asyncio.AbstractEventLoop, backend: Backend, body: dict[str, Any]) -> str:
    """Print an answer as it comes, and what it took; returns its text, as far as it came."""
    from app.thoughts import Thought

    texts: list[str] = []

    async def show() -> None:
        thinking = False
        async for piece in backend.answer(body):
            if isinstance(piece, Thought):
                thinking = True
                typer.secho(piece.text, dim=True, nl=False)
            elif isinstance(piece, str):
                if thinking and piece:
                    thinking = False
                    print("\n")
                texts.append(piece)
                print(piece, end="", flush=True)
            else:
                typer.secho(
                    f"\n[τ {piece.acceptance_length:.2f} · {piece.tokens_per_second:.0f} tokens/s · {piece.tokens} tokens]",
                    dim=True,
                )

    task = loop.create_task(show())
    try:
        loop.run_until_complete(task)
    except KeyboardInterrupt:
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        typer.echo("\n[stopped]")
    return "".join(texts)
