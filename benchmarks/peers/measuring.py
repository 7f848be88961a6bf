"""All ways in turn, prompt by prompt, so that drifts of the machine's speed hit all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.peers.ways import Answered, PeerError, Way
from benchmarks.prompts import Prompt


@dataclass(slots=True)
class Results:
    """Answers by how many are asked at once, by way, and by number of the group and round.

    ``idle_cpu``: processor seconds of servers that were not asked, of ``busy`` seconds in which others were.
    """

    runs: dict[tuple[int, str], dict[int, Answered]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    idle_cpu: float = 0.0
    busy: float = 0.0


def groups(prompts: Sequence[Prompt], at_once: int) -> list[Sequence[Prompt]]:
    """Prompts that are asked at once; those that do not fill a group are left out."""
    return [prompts[first : first + at_once] for first in range(0, len(prompts) - at_once + 1, at_once)]


def asked(ways: Sequence[Way], prompts: Sequence[Prompt], concurrency: Sequence[int], rounds: int) -> int:
    """How many groups are asked of all ways together, the first ones that nobody measures included."""
    return sum((rounds * len(groups(prompts, each)) + 1) * len(_able(ways, each)) for each in concurrency)


async def measure(
    ways: Sequence[Way],
    prompts: Sequence[Prompt],
    results: Results,
    *,
    concurrency: Sequence[int],
    rounds: int,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Ask every group of every way, the ways taking turns at going first. A way that fails is asked no more.

    Figures so far stand in ``results`` whatever happens.
    """
    for at_once in concurrency:
        all_groups = groups(prompts, at_once)
        able = _able(ways, at_once)
        failed: set[str] = set()
        # What comes first pays for what is set up. The last group: llama.cpp knows the text that it had just before.
        for number, group in [(-1, all_groups[-1]), *enumerate(all_groups * rounds)]:
            first = max(number, 0) % len(able)
            for way in able[first:] + able[:first]:
                if way.name not in failed:
                    try:
                        answered = await _watched(way, able, group, results)
                    except PeerError as error:
                        results.failures.append(f"{error} ({at_once} at once)")
                        failed.add(way.name)
                    else:
                        if number >= 0:
                            results.runs.setdefault((at_once, way.name), {})[number] = answered
                progress()


def _able(ways: Sequence[Way], at_once: int) -> list[Way]:
    return [way for way in ways if at_once == 1 or way.batches]


async def _watched(way: Way, ways: Sequence[Way], group: Sequence[Prompt], results: Results) -> Answered:
    """Its answer; what the other servers did meanwhile is added up."""
    others = {other.process for other in ways if other.process is not None and other.process is not way.process}
    before = {process: process.cpu_seconds for process in others}
    answered = await way.answer(group)
    for process, then in before.items():
        now = process.cpu_seconds
        if then is not None and now is not None:
            results.idle_cpu += now - then
    results.busy += answered.seconds
    return answered
