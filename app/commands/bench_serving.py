"""`moaserve bench serving`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from app.commands import loading, options

if TYPE_CHECKING:
    from benchmarks.serving.hosting import Other
    from benchmarks.serving.keeping import Kept
    from benchmarks.serving.measuring import Plan
    from benchmarks.serving.slo import Slo
    from benchmarks.serving.ways import Own

LOAD, ASKED, ELSEWHERE = "The load", "What is asked", "A server that runs already"
LOADS = "0.1,0.25,0.5,0.75,1"
_FORMS = ("tokens", "text", "chat")


def serving(
    way: Annotated[
        list[str] | None,
        typer.Option(
            help="off, chain, tree, adaptive or bare (a server without a drafter). Give it again for more. (default: all but bare)",
            rich_help_panel=LOAD,
        ),
    ] = None,
    rates: Annotated[str | None, typer.Option(help="Requests a second: 0.5,1,2,4.", rich_help_panel=LOAD)] = None,
    load: Annotated[
        str | None,
        typer.Option(
            help="Instead of --rates: shares of what plain decoding sustains, which is measured first. "
            f"(default: {LOADS}; with --compare that file's rates)",
            rich_help_panel=LOAD,
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0, help="How long each rate lasts, in each round and way.", rich_help_panel=LOAD)
    ] = 30,
    num_requests: Annotated[
        int, typer.Option(min=1, help="Fewest requests of these, however long they take to come.", rich_help_panel=LOAD)
    ] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="How often all rates are measured, in all ways.", rich_help_panel=LOAD)] = 3,
    warm_up: Annotated[
        int, typer.Option(min=0, help="Requests more at the beginning of each rate that do not count.", rich_help_panel=LOAD)
    ] = 4,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds after which a request has failed.", rich_help_panel=LOAD)
    ] = 120,
    slo: Annotated[
        str | None,
        typer.Option(
            help="What goodput counts: ttft:500ms,tpot:50ms,e2e:5s or some of these. (default: ttft and tpot of five times what an "
            "idle server takes to decode plainly; with --compare that file's)",
            rich_help_panel=LOAD,
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, help="Requests at a time that capacity is measured with. (default: --max-num-seqs)", rich_help_panel=LOAD
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help='JSONL (or .jsonl.gz) of {"messages": …}, {"turns": …} or {"prompt": …} lines. (default: 64 bundled prompts)',
            rich_help_panel=ASKED,
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="How many of them.", rich_help_panel=ASKED)] = 64,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts are left out.", rich_help_panel=ASKED)] = 1024,
    output_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most tokens of every answer. (default: as many as the file's own answer has; of prompts without one drawn, 64 in "
            "the median)",
            rich_help_panel=ASKED,
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="And never more than this.", rich_help_panel=ASKED)] = 256,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="Have answers go on to that length. What a model writes after its end repeats itself, and is easily drafted.",
            rich_help_panel=ASKED,
        ),
    ] = False,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy.", rich_help_panel=ASKED)] = 0,
    seed: Annotated[
        int, typer.Option(min=0, help="Which prompts are drawn, when they come, and sampling's seeds.", rich_help_panel=ASKED)
    ] = 0,
    base_url: Annotated[
        str | None,
        typer.Option(help="Measure it, in one way, instead of servers of ours: http://HOST:PORT/v1.", rich_help_panel=ELSEWHERE),
    ] = None,
    served_model: Annotated[
        str | None, typer.Option(help="Its name there. (default: the first that it has)", rich_help_panel=ELSEWHERE)
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Its key.", show_envvar=True, rich_help_panel=ELSEWHERE)
    ] = None,
    name: Annotated[str, typer.Option(help="What it is called in tables and pictures.", rich_help_panel=ELSEWHERE)] = "server",
    ask: Annotated[
        str,
        typer.Option(
            help="How it is asked: chat (messages, without tools), or completions of the prompt as --model renders it, as text or "
            "as tokens.",
            rich_help_panel=ELSEWHERE,
        ),
    ] = "chat",
    extra: Annotated[
        str | None, typer.Option(help="JSON object of more parameters for every request.", rich_help_panel=ELSEWHERE)
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(exists=True, help="Results of another measurement with the same requests, to be put beside this one's."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results.json and pictures.", callback=options.writable_folder)
    ] = None,
    pin: Annotated[
        bool, typer.Option("--pin/--no-pin", help="Keep servers off one core, which the generator has, where there are two.")
    ] = True,
    model: options.Model = None,
    dtype: options.DType = None,
    device: options.Device = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.MaxNumSeqs = 32,
    num_threads: Annotated[
        int | None,
        typer.Option(
            min=1, help="CPU threads of each server. (default: one for each of its cores)", rich_help_panel=options.ENGINE
        ),
    ] = None,
    compile: options.Compile = None,
    drafter: options.Drafter = None,
    chain: Annotated[
        int, typer.Option(min=1, help="Tokens that the chain drafts ahead, at every step.", rich_help_panel=options.SPECULATION)
    ] = 3,
    draft_depth: options.DraftDepth = None,
    draft_breadth: options.DraftBreadth = None,
    draft_nodes: options.DraftNodes = None,
    draft_temperature: options.DraftTemperature = None,
    draft_lookup: options.DraftLookup = None,
    draft_window: options.DraftWindow = None,
) -> None:
    """A server under load: requests that come when they come (Poisson), with speculation off, as a chain, as a tree, by the policy.

    Starts servers, and sends every way the same requests at the same times with the same seeds, in turn, at each rate and in each
    round. Times count from when a request was due, whenever it was sent. Ends with exit code 1 when a request fails.

    For example:

      moaserve bench serving --out results

      moaserve bench serving --rates 0.5,1,2,4,8,16,32 --prompts chats.jsonl.gz --slo ttft:500ms,tpot:50ms

      moaserve bench serving --base-url http://127.0.0.1:9000/v1 --name other --model path --ask tokens --compare results
    """
    if ask not in _FORMS:
        options.fail(f"--ask must be {', '.join(_FORMS[:-1])} or {_FORMS[-1]}, got {ask!r}", code=2)
    if rates and load:
        options.fail("--rates and --load say the same: use one of them", code=2)
    ways, asked, limits, more = _ways(way), _numbers("--rates", rates) or [], _slo(slo), options.json_object("--extra", extra)
    if base_url is not None and way:
        options.fail("--way is of servers that this command starts: ask --base-url in another way with --extra", code=2)
    for option, value in (("--extra", extra), ("--served-model", served_model)):
        if base_url is None and value is not None:
            options.fail(f"{option} is for a server that runs already: give its --base-url", code=2)
    engine = {"model": model, "dtype": dtype, "device": device, "max_model_len": max_model_len, "compile": compile}
    drafting = {"draft_temperature": draft_temperature, "draft_lookup": draft_lookup, "draft_window": draft_window}
    trees = {"draft_depth": draft_depth, "draft_breadth": draft_breadth, "draft_nodes": draft_nodes}
    common = engine | {"drafter": drafter, "max_num_seqs": max_num_seqs, "num_threads": num_threads} | drafting
    ours = [
        name for name, value in (engine | common | trees).items() if value is not None and name not in ("model", "max_num_seqs")
    ]
    if base_url is not None and ours:
        options.fail(f"--{ours[0].replace('_', '-')} is of servers that this command starts, not of --base-url", code=2)
    options.load_settings(**common, **trees)
    from benchmarks.network.processes import usable_cores
    from benchmarks.prompts import BUNDLED_PROMPTS, load_prompts
    from benchmarks.serving import hosting, keeping, measuring
    from benchmarks.serving.arrivals import Workload
    from benchmarks.serving.ways import Own

    kept = None
    if compare is not None:
        if load:
            options.fail("--load does not go with --compare: rates are that file's", code=2)
        try:
            kept = keeping.read(compare)
        except keeping.CompareError as error:
            options.fail(f"--compare {compare}: {error}")
    with loading.clear_errors():
        tokenizer = loading.load_tokenizer(model or "bundled")
        selected = load_prompts(
            prompts or BUNDLED_PROMPTS, tokenizer, count=num_prompts, max_tokens=max_prompt_tokens, seed=seed, with_answers=True
        )
    server_cores, client_cores = _cores(usable_cores() if pin else [])
    threads = num_threads or (len(server_cores) if server_cores else None)
    host: Own | Other
    if base_url is None:
        host = Own(_flags(common | {"num_threads": threads}), _flags(trees), chain)
    else:
        form: hosting.Form = "tokens" if ask == "tokens" else "text" if ask == "text" else "chat"
        host = hosting.Other(name, base_url, api_key, served_model, form, more or {})
    plan = measuring.Plan(
        host=host,
        ways=ways if base_url is None else [name],
        workload=Workload(selected, seconds, num_requests, warm_up, max_tokens, output_tokens, seed),
        rates=list(kept.rates) if kept and not asked else asked or _numbers("--load", load or LOADS) or [],
        of_capacity=not asked and kept is None,
        with_capacity=base_url is None,
        rounds=rounds,
        at_once=concurrency or max_num_seqs or 32,
        body={"temperature": temperature} | ({"ignore_eos": True} if ignore_eos else {}),
        slo=limits or (kept.slo if kept else None),
        timeout=timeout,
        server_cores=server_cores if base_url is None else None,
        client_cores=client_cores if base_url is None else None,
    )
    if kept is not None:
        try:
            keeping.check_same_requests(kept, plan)
        except keeping.CompareError as error:
            options.fail(f"--compare {compare}: {error}")
    answered = sum(prompt.answer_tokens is not None for prompt in selected)
    notes = [f"Answers are at most as long as the file's own for {answered} of {len(selected)} prompts, for others as drawn."]
    notes = [] if output_tokens else notes
    if base_url is None:
        notes.append(_where(plan.server_cores, plan.client_cores))
    _run(plan, kept, notes, out, base_url)


def _run(plan: Plan, kept: Kept | None, notes: list[str], out: Path | None, base_url: str | None) -> None:
    """Measure, tell and keep; ends the program with 1 where something failed."""
    import asyncio

    from benchmarks.network.processes import ProcessError
    from benchmarks.serving import keeping, measuring, report
    from benchmarks.serving.client import AddressError
    from benchmarks.serving.hosting import ServerError

    results = measuring.Results()
    with typer.progressbar(length=0, label="preparing", show_pos=True, file=typer.get_text_stream("stderr")) as bar:
        # An hour of figures must not be lost to what comes last.
        keep = (lambda: None) if out is None else lambda: keeping.write(results, plan, kept, notes, out)
        try:
            asyncio.run(measuring.measure(plan, results, _Watcher(bar, keep)))
        except (ProcessError, ServerError, AddressError) as error:
            results.failures.append(f"--base-url {base_url}: {error}" if base_url else str(error))
        except KeyboardInterrupt:
            results.failures.append("it was interrupted")
    if not results.runs:
        options.fail("nothing was measured: " + "; ".join(results.failures))
    report.print_results(results, plan, kept, notes)
    if out is not None:
        try:
            for path in report.write_all(results, plan, kept, notes, out):
                typer.echo(path)
        except ImportError:
            options.fail("no pictures: pip install 'moaserve[eval]'; the figures are written")
    raise typer.Exit(1 if report.failing(results) else 0)


class _Bar(Protocol):
    """A progress bar whose length is known once rates are."""

    length: int | None
    label: str

    def update(self, n_steps: int) -> None: ...


class _Watcher:
    """Shows how far a measurement is."""

    def __init__(self, bar: _Bar, noted: Callable[[], object]) -> None:
        self._bar, self._noted = bar, noted

    def expect(self, requests: int, seconds: float) -> None:
        """The bar begins anew."""
        typer.echo(f"{requests} requests, {time.strftime('%H:%M:%S', time.gmtime(seconds))} at least", err=True)
        self._bar.length = requests

    def begin(self, what: str) -> None:
        """What is measured now."""
        self._bar.label = what

    def answered(self) -> None:
        """One more."""
        self._bar.update(1)

    def noted(self) -> None:
        """Keep what there is."""
        self._noted()


def _ways(names: list[str] | None) -> list[str]:
    from benchmarks.serving.ways import WAYS

    unknown = [name for name in names or () if name not in WAYS]
    if unknown:
        options.fail(f"no way {unknown[0]!r}: use {', '.join(WAYS)}", code=2)
    return [name for name in WAYS if name != "bare"] if not names else list(dict.fromkeys(names))


def _numbers(option: str, text: str | None) -> list[float] | None:
    """Positive numbers with commas, in order."""
    if text is None:
        return None
    try:
        numbers = sorted({float(each) for each in text.split(",")})
    except ValueError:
        options.fail(f"{option} must be numbers with commas, got {text!r}", code=2)
    if not all(0 < number < float("inf") for number in numbers):
        options.fail(f"{option}: each must be more than 0, got {text!r}", code=2)
    return numbers


def _slo(text: str | None) -> Slo | None:
    from benchmarks.serving.slo import Slo

    try:
        return None if text is None else Slo.parse(text)
    except ValueError as error:
        options.fail(f"--slo: {error}", code=2)


def _flags(values: dict[str, Any]) -> list[str]:
    """As options of `moaserve serve`; those that were not given are its defaults."""
    return [part for name, value in values.items() if value is not None for part in ("--" + name.replace("_", "-"), str(value))]


def _cores(usable: list[int]) -> tuple[frozenset[int] | None, frozenset[int] | None]:
    """The servers' cores, and the generator's; None where there are not two."""
    return (frozenset(usable[:-1]), frozenset(usable[-1:])) if len(usable) > 1 else (None, None)


def _where(server: frozenset[int] | None, client: frozenset[int] | None) -> str:
    if server is None or client is None:
        return "Cores: not pinned; servers and generator get in each other's way."
    return f"Cores: servers on {', '.join(map(str, sorted(server)))}, the generator on {min(client)}."
