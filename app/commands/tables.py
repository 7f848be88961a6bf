"""Results as tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.alone import Continuation
    from benchmarks.evaluation import Case, Figures
    from benchmarks.gateway import GatewayResult
    from benchmarks.gpu import ShapeCosts
    from benchmarks.offline import OfflineResult
    from benchmarks.watching import WatchingResult


def print_offline(result: OfflineResult) -> None:
    """Two tables: speed, and how drafts fared."""
    from benchmarks import printing
    from benchmarks.offline import PLAIN, SPECULATIVE, spread

    console = printing.console()
    asked = f"{len(result.prompts)} prompts"
    if len(result.compared) < len(result.prompts):
        asked += f" of {len(result.compared)} conversations"
    columns = ["", "tokens/s", "over plain (median, quartiles)", "same tokens as plain"]
    speed = printing.table(f"{result.settings['model']}, {result.settings['dtype']}, {asked}, greedy", columns)
    for way in result.runs:
        ratio = spread(result.ratios(way, PLAIN))
        speed.add_row(
            way,
            f"{result.tokens_per_second(way):.0f}",
            f"{ratio['median']:.2f}x ({ratio['p25']:.2f}–{ratio['p75']:.2f})",
            f"{result.identical(way, PLAIN)} of {len(result.prompts)}",
        )
    console.print(speed)
    acceptance = result.acceptance()
    columns = ["τ", "target passes", "drafted", "accepted", "accepted at depth 1, 2, …"]
    drafts = printing.table(f"drafter: {result.settings['drafter']}", columns, left=())
    drafts.add_row(
        f"{acceptance.tau:.2f}",
        str(acceptance.target_passes),
        str(acceptance.drafted),
        str(acceptance.accepted),
        "  ".join(f"{share:.0%}" for share in acceptance.by_depth),
    )
    console.print(drafts)
    by_source = result.ratios_by_source(SPECULATIVE, PLAIN)
    told = ", ".join(f"{source} {spread(ratios)['median']:.2f}x" for source, ratios in by_source.items())
    console.print(f"speculative over plain by source: {told}")
    if ended := result.ratios_of_ended(SPECULATIVE, PLAIN):
        whole = f"{len(ended)} of {len(result.compared)}"
        console.print(f"of the {whole} whose answers ended by themselves: {spread(ended)['median']:.2f}x")
    console.print("τ by source: " + ", ".join(f"{source} {tau:.2f}" for source, tau in result.tau_by_source().items()))
    decoding = result.decode_ratio(SPECULATIVE, PLAIN)
    if decoding == decoding:  # else each answer came with its prompt's step
        console.print(f"decoding alone, prefill left out: speculative is {decoding:.2f}x plain over all prompts")
    console.print(result.provenance.line())


def print_evaluation(results: dict[Case, dict[str, Figures]]) -> None:
    """A table of all cases for each way of sampling, then how deep drafts are accepted."""
    from benchmarks import printing
    from benchmarks.evaluation import ALL

    console = printing.console()
    for sampling in dict.fromkeys(case.sampling for case in results):
        columns = ["drafter", "source", "τ (95%)", "decoding", "end to end", "tokens/s", "passes/token", "draft cost"]
        table = printing.table(
            f"{sampling}; speeds are over plain decoding, draft cost is in its steps", columns, left=("drafter", "source")
        )
        for case, sources in results.items():
            if case.sampling != sampling:
                continue
            for source, each in sources.items():
                table.add_row(
                    f"{case.drafter}, {case.shape}",
                    source,
                    f"{each.tau:.2f} ({each.tau_low:.2f}–{each.tau_high:.2f})",
                    f"{each.decode_ratio:.2f}x",
                    f"{each.end_to_end:.2f}x",
                    f"{each.tokens_per_second:.0f}",
                    f"{each.passes_per_token:.2f}",
                    f"{each.draft_cost:.2f}",
                )
            table.add_section()
        console.print(table)
    console.print("accepted at depth 1, 2, …, all sources:")
    for case, sources in results.items():
        shares = " ".join(f"{share:.0%}" for share in sources[ALL].by_depth)
        console.print(f"  {case.drafter}, {case.shape}, {case.sampling}: {shares or 'none'}")


def print_watching(result: WatchingResult) -> None:
    """A table of ratios, and what was measured directly."""
    from benchmarks import printing

    figures = result.as_dict()
    console = printing.console()
    columns = ["", "tokens per second", "processor time per token"]
    ratios = printing.table(f"{result.concurrency} requests at once; median and quartiles of rounds", columns)
    for name in figures["speed_ratios"]:
        cells = (figures["speed_ratios"][name], figures["cpu_ratios"][name])
        ratios.add_row(name, *(f"{each['median']:.3f} ({each['p25']:.3f}–{each['p75']:.3f})" for each in cells))
    console.print(ratios)
    console.print(
        f"Recording alone: {result.recorder_seconds * 1e6:.2f} µs of processor time per token, {result.recorder_share:.3%} of all. "
        f"A scrape: {result.scrape_seconds * 1e3:.1f} ms."
    )


def print_gpu(costs: ShapeCosts) -> None:
    """Steps of one shape, and the least that they can take."""
    from benchmarks import printing

    sizes = f"{costs.parameters / 1e9:.2f} G parameters, drafter {costs.drafter_parameters / 1e9:.2f} G"
    table = printing.table(
        f"{costs.shape.name}: {sizes}; milliseconds, medians of steps",
        (
            "texts",
            "nodes",
            "",
            "plain",
            "draft",
            "a level",
            "verify",
            "commit",
            "least",
            "verify / least",
            "least / level",
        ),
    )
    for step in costs.steps:
        times = (step.plain, step.draft, step.level, step.verify, step.commit, step.floor)
        ratios = step.as_dict()
        table.add_row(
            str(step.batch),
            str(step.nodes),
            "recorded" if step.replayed else "launched",
            *(f"{seconds * 1e3:.2f}" for seconds in times),
            f"{ratios['verify_over_floor']:.2f}",
            f"{ratios['floor_over_level']:.1f}",
        )
    printing.console().print(table)


def print_gateway(result: GatewayResult) -> None:
    """Two tables: what the gateway costs, and what held the event loop up."""
    from benchmarks import printing
    from benchmarks.gateway import DIRECT, HTTP
    from benchmarks.offline import spread

    console = printing.console()
    columns = ["requests at once", "tokens/s alone", "over HTTP", "cost", "event loop per token"]
    costs = printing.table("medians of rounds; the cost with quartiles", columns, left=())
    for concurrency, arms in result.rounds.items():
        speeds = (spread([each.tokens_per_second for each in arms[arm]])["median"] for arm in (DIRECT, HTTP))
        cost = result.cost(concurrency)
        costs.add_row(
            str(concurrency),
            *(f"{speed:.0f}" for speed in speeds),
            f"{cost['median']:.1%} ({cost['p25']:.1%}–{cost['p75']:.1%})",
            f"{result.loop_seconds(concurrency) * 1e6:.0f} µs",
        )
    console.print(costs)
    if not result.disturbed:
        return
    columns = ["", "longest block", "its own", "over 20 ms", "longest silence", "statuses", "where"]
    blocks = printing.table(f"posted amid {max(result.rounds)} streams", columns, left=("", "statuses", "where"))
    for name, each in result.disturbed.items():
        blocks.add_row(
            name,
            f"{each.block.seconds * 1e3:.1f} ms",
            f"{each.block.cpu_seconds * 1e3:.1f} ms",
            str(each.over),
            f"{each.longest_silence * 1e3:.0f} ms",
            " ".join(map(str, sorted(set(each.statuses)))),
            each.block.where[0] if each.block.where else "",
        )
    console.print(blocks)


def print_alone(results: dict[str, list[Continuation]]) -> None:
    """A row for each cut and drafter."""
    from benchmarks import printing
    from benchmarks.alone import figures

    columns = (
        "target gone after",
        "drafter",
        "answers",
        "same up to the first difference",
        "similarity",
        "whole rests",
        "tool calls",
    )
    table = printing.table("what drafters write alone, beside their target's own text", columns, left=("drafter",))
    cuts = sorted({each.cut for continuations in results.values() for each in continuations})
    for cut in cuts:
        for name, continuations in results.items():
            each = figures([one for one in continuations if one.cut == cut])
            calls = f"{each.calls_exact:.0%} of {each.calls}" if each.calls else "none"
            shares = (each.agreement, each.similarity, each.exact)
            table.add_row(f"{cut:.0%}", name, str(each.answers), *(f"{share:.1%}" for share in shares), calls)
        table.add_section()
    printing.console().print(table)
