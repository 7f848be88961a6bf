"""`moaserve bench network`."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from app.commands import loading, options

if TYPE_CHECKING:
    from benchmarks.network.links import Link

COMPARED = "What is compared"


def network(
    link: Annotated[
        list[str] | None, typer.Option(help="lan, 5g, 4g or poor. Give it again for more. (default: all)", rich_help_panel=COMPARED)
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(min=0, help="0: greedy. Give it again for more. (default: 0 and 1)", rich_help_panel=COMPARED),
    ] = None,
    independent: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Folder of a small model to draft on an edge too.", rich_help_panel=COMPARED
        ),
    ] = None,
    eagle: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Folder of an EAGLE-2 drafter to draft on an edge too.", rich_help_panel=COMPARED
        ),
    ] = None,
    clients: Annotated[
        int, typer.Option(min=0, help="Then as many at once, to see what a server can serve; 0: none.", rich_help_panel=COMPARED)
    ] = 8,
    clients_link: Annotated[str, typer.Option(help="The link that they have, each its own.", rich_help_panel=COMPARED)] = "5g",
    transport: Annotated[
        str,
        typer.Option(
            help="namespaces: the kernel's netem, as root on Linux; relay: in this process; auto: the first where it can be had."
        ),
    ] = "auto",
    pin: Annotated[bool, typer.Option("--pin/--no-pin", help="Keep the server on a core of its own, where there are two.")] = True,
    prompts: options.Prompts = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="How many of them.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is asked.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens generated per prompt.")] = 128,
    max_prompt_tokens: options.MaxPromptTokens = 1024,
    seed: Annotated[int, typer.Option(help="Which prompts are drawn; also sampling's seed, and the relay's.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results.json and pictures.", callback=options.writable_folder)
    ] = None,
    model: Annotated[
        str, typer.Option(help="The target: 'bundled', a folder or a hub id.", rich_help_panel=options.ENGINE)
    ] = "bundled",
    drafter: Annotated[
        str, typer.Option(help="The MoA drafter: auto, a folder or a hub id.", rich_help_panel=options.SPECULATION)
    ] = "auto",
    draft_nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most candidates that edges send at once, whatever drafts; how many follows from the network. (default: 32)",
            rich_help_panel=options.SPECULATION,
        ),
    ] = None,
    draft_window: Annotated[
        int,
        typer.Option(
            min=0, help="How many of a prompt's last tokens MoA and EAGLE-2 read; 0: all.", rich_help_panel=options.SPECULATION
        ),
    ] = 64,
    dtype: Annotated[
        str,
        typer.Option(help="auto, float32 or bfloat16; texts can be compared exactly in float32.", rich_help_panel=options.ENGINE),
    ] = "float32",
    compile: Annotated[
        str, typer.Option(help="Of servers and MoA's edges: auto, on or off.", rich_help_panel=options.ENGINE)
    ] = "auto",
) -> None:
    """Drafting on an edge over slow networks, against streaming from the server: speed, first token, bytes and server time.

    Starts servers and edges, puts an emulated network between them, and asks all kinds the same prompts with the same seeds, in
    turn. Every text is compared with plain streaming's; ends with exit code 1 when any differs or fails. One that fails is left
    out, and with --out what there is stands there after every round.

    For example:

      moaserve bench network --link 4g --link poor --clients 0

      moaserve bench network --independent runs/independent --eagle runs/eagle2 --out results
    """
    links, crowded_over = _links(link), _links([clients_link])[0]
    transports: dict[str, Literal["auto", "namespaces", "relay"]] = {"auto": "auto", "namespaces": "namespaces", "relay": "relay"}
    if transport not in transports:
        options.fail(f"--transport must be auto, namespaces or relay, got {transport!r}", code=2)
    options.load_settings(model=model, drafter=drafter, dtype=dtype, compile=compile)
    import asyncio

    from benchmarks.network import figures, kinds, measuring, report, verdicts
    from benchmarks.network.namespaces import NetworkError
    from benchmarks.network.processes import Cores, ProcessError, usable_cores
    from benchmarks.network.transports import choose_transport
    from benchmarks.prompts import BUNDLED_PROMPTS, load_prompts
    from speculative.edge_export import export_edge

    with loading.clear_errors():
        tokenizer = loading.load_tokenizer(model)
        selected = load_prompts(prompts or BUNDLED_PROMPTS, tokenizer, count=num_prompts, max_tokens=max_prompt_tokens, seed=seed)
    try:
        chosen, reason = choose_transport(transports[transport], [*links, crowded_over] if clients else links)
    except NetworkError as error:
        options.fail(f"--transport {transport}: {error}")
    cores = Cores.split(usable_cores()) if pin else None
    notes = [f"Network: {chosen}{f', as the kernel cannot: {reason}' if reason else ''}."]
    notes.append(
        f"Cores: {cores.describe()}." if cores else "Cores: not pinned; servers, edges and client get in each other's way."
    )
    notes += [
        f"Left out: {name} (--{name} FOLDER)." for name, folder in (("independent", independent), ("eagle", eagle)) if not folder
    ]
    for note in notes:
        typer.echo(note, err=True)
    pair = kinds.Pair(model, drafter, dtype, compile, draft_nodes, draft_window)
    results = measuring.Results()
    with tempfile.TemporaryDirectory(prefix="moaserve-bench-") as folder:
        bundle = Path(folder, "bundle")
        with loading.clear_errors():
            export_edge(
                model, "bundled" if drafter == "auto" else drafter, bundle, dtype="float32" if dtype == "float32" else "bfloat16"
            )
        plan = measuring.Plan(
            pair=pair,
            kinds=kinds.kinds(bundle, independent, eagle),
            links=links,
            temperatures=[0.0, 1.0] if temperature is None else temperature,
            prompts=selected,
            rounds=rounds,
            max_tokens=max_tokens,
            seed=seed,
            clients=clients,
            crowded_over=crowded_over,
            transport=chosen,
            cores=cores,
        )
        with typer.progressbar(
            length=plan.num_requests, label="asking", show_pos=True, file=typer.get_text_stream("stderr")
        ) as bar:
            # An hour of figures must not be lost to what comes last.
            keep = (lambda: None) if out is None else partial(report.write_figures, results, plan, notes, out)
            try:
                asyncio.run(measuring.measure(plan, results, measuring.Watcher(partial(bar.update, 1), keep)))
            except (ProcessError, NetworkError) as error:
                results.failures.append(str(error))
            except KeyboardInterrupt:
                results.failures.append("it was interrupted")
    if not results.runs:
        options.fail("nothing was measured: " + "; ".join(results.failures))
    report.print_results(results, plan, notes)
    if out is not None:
        try:
            for path in report.write(results, plan, notes, out):
                typer.echo(path)
        except ImportError:
            options.fail("no pictures: pip install 'moaserve[eval]'; the figures are written")
    different, _ = verdicts.differing([*figures.figures(results).values(), *figures.crowd_figures(results).values()])
    raise typer.Exit(1 if different or results.failures else 0)


def _links(names: list[str] | None) -> list[Link]:
    from benchmarks.network.links import LINKS

    unknown = [name for name in names or () if name not in LINKS]
    if unknown:
        options.fail(f"no link {unknown[0]!r}: use {', '.join(LINKS)}", code=2)
    return list(LINKS.values()) if names is None else [LINKS[name] for name in dict.fromkeys(names)]
