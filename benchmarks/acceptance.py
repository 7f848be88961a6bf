"""How drafts fare: acceptance over many requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.decoding import decode
from benchmarks.prompts import Prompt
from speculative.engine import Engine
from speculative.request import RequestStats, SamplingParams


@dataclass(frozen=True, slots=True)
class Acceptance:
    """``tau`` tokens gained per verification, ``by_depth[d]`` the share of drafts accepted beyond depth d; then plain counts."""

    tau: float
    by_depth: tuple[float, ...]
    target_passes: int
    drafted: int
    accepted: int

    def line(self) -> str:
        """For people."""
        if not self.by_depth:
            return f"τ {self.tau:.2f}; {'no draft was accepted' if self.drafted else 'nothing was drafted'}"
        shares = " ".join(f"{share:.0%}" for share in self.by_depth)
        return f"τ {self.tau:.2f}; accepted at depth 1, 2, …: {shares}"


def summarize(stats: Sequence[RequestStats]) -> Acceptance:
    """Pool requests' counters."""
    depth = max((len(s.acceptance_histogram) for s in stats), default=0)
    histogram = [sum(s.acceptance_histogram[k] for s in stats if k < len(s.acceptance_histogram)) for k in range(depth)]
    drafts = sum(histogram)
    accepted = sum(s.num_accepted_draft_tokens for s in stats)
    return Acceptance(
        tau=1 + accepted / drafts if drafts else 1.0,
        by_depth=tuple(sum(histogram[k:]) / drafts for k in range(1, depth)) if drafts else (),
        target_passes=sum(s.num_target_calls for s in stats),
        drafted=sum(s.num_draft_tokens for s in stats),
        accepted=accepted,
    )


def measure_acceptance(
    engine: Engine, prompts: Sequence[Prompt], *, max_tokens: int, progress: Callable[[], None] = lambda: None
) -> Acceptance:
    """Greedy speculative decoding of all prompts."""
    stats: list[RequestStats] = []
    for prompt in prompts:
        run = decode(engine, prompt, SamplingParams(max_tokens, temperature=0.0))
        if run.stats is not None:
            stats.append(run.stats)
        progress()
    return summarize(stats)
