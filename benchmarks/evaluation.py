"""`moaserve eval`: drafters side by side on the same target, prompts and trees; a definition of every figure stands at its name."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.acceptance import Acceptance, summarize
from benchmarks.decoding import Decoded, decode, decode_ratio
from benchmarks.machine import Provenance, provenance
from benchmarks.prompts import Prompt
from models.kv_cache import KVCache
from speculative.config import EngineConfig, MemoryFormat
from speculative.drafters.base import Drafter, VerifiedTokens
from speculative.drafters.moa import MoADrafter
from speculative.drafters.wrapper import DrafterWrapper, innermost
from speculative.engine import Engine
from speculative.errors import EngineLoadError
from speculative.policy import DraftShape
from speculative.remote.memory_codec import MemoryCodec
from speculative.request import RequestStats, SamplingParams
from speculative.sequence import Sequence as RunningSequence
from speculative.tree import DraftTree

ALL = "all"
"""The name under which the figures of all sources together stand."""

_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Case:
    """One drafter under one way of drafting and one of sampling: a row of the table."""

    drafter: str
    shape: str
    sampling: str


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt under one case: speculative and plain, and what drafting took of the former."""

    source: str
    speculative: Decoded
    plain: Decoded
    draft_seconds: float


@dataclass(frozen=True, slots=True)
class Figures:
    """What a case's runs come to.

    ``tau`` is tokens gained per verification, with ``tau_low`` and ``tau_high`` a 95% interval over prompts (bootstrap);
    ``passes_per_token`` target passes per token, prefill included; ``decode_ratio`` speed over plain decoding without prefill,
    ``end_to_end`` the median over prompts with it; ``draft_cost`` what drafting takes per verification, memory included, in plain
    decode steps; ``identical`` the share of outputs that equal plain decoding's (in float32 all).
    """

    prompts: int
    tau: float
    tau_low: float
    tau_high: float
    by_depth: tuple[float, ...]
    tokens_per_second: float
    decode_ratio: float
    end_to_end: float
    passes_per_token: float
    draft_cost: float
    identical: float


class TimedDrafter(DrafterWrapper):
    """Passes everything on and adds up what drafting and taking note of verified tokens take, prompts left out."""

    def __init__(self, other: Drafter) -> None:
        super().__init__(other)
        self.seconds = 0.0

    def extend(self, verified: VerifiedTokens, target_cache: KVCache) -> None:
        """Timed."""
        start = time.perf_counter()
        super().extend(verified, target_cache)
        self.seconds += time.perf_counter() - start

    def propose(self, sequences: list[RunningSequence], shape: DraftShape, target_cache: KVCache | None) -> DraftTree:
        """Timed."""
        start = time.perf_counter()
        tree = super().propose(sequences, shape, target_cache)
        self.seconds += time.perf_counter() - start
        return tree


class SentMemory(DrafterWrapper):
    """Has a MoA drafter draft from memory that came over a network in ``format``, as in client-server mode.

    What it notes of verified tokens is replaced by what arrives of it: CA's keys and values, and memory itself for an entry.
    """

    def __init__(self, other: Drafter, format: MemoryFormat) -> None:
        super().__init__(other)
        drafter = innermost(other)
        if not isinstance(drafter, MoADrafter):
            raise EngineLoadError(f"drafter {other.name} has no memory that could be sent: only a MoA drafter has")
        if drafter.config.paired:
            raise EngineLoadError(
                "what is sent of paired memory cannot be evaluated beside its target yet: leave --memory-format out"
            )
        codec = MemoryCodec.of(drafter.network.moa.config, format)
        self._codecs = [codec.rows, *(() if codec.newest is None else (codec.newest,))]

    def extend(self, verified: VerifiedTokens, target_cache: KVCache) -> None:
        """As in Drafter."""
        super().extend(verified, target_cache)
        for cache, codec in zip(self.caches[1:], self._codecs, strict=True):
            rows = cache.flat_rows(verified.slots, verified.positions)
            sent = cache.gather(rows)[:, 0]
            cache.write(0, rows, codec.decode(codec.encode(sent)).to(sent))


def shapes(config: EngineConfig) -> dict[str, EngineConfig]:
    """The ways of drafting that are compared: the configured tree, and a chain as deep."""
    return {"tree": config, "chain": replace(config, draft_breadth=1, draft_nodes=config.draft_depth)}


def evaluate(
    load: Callable[[EngineConfig], Engine],
    configs: dict[str, EngineConfig],
    prompts: Sequence[Prompt],
    *,
    shape_names: Sequence[str],
    temperatures: Sequence[float],
    max_tokens: int,
    seed: int,
    memory_formats: Sequence[MemoryFormat | None] = (None,),
    progress: Callable[[], None] = lambda: None,
) -> Iterator[tuple[Case, list[Run]]]:
    """All prompts for each drafter of ``configs``, shape and temperature, as they are done; each run has a plain one beside it.

    With ``memory_formats`` all that again for each, with memory as it would be sent; None leaves it as it is.
    """
    for name, config in configs.items():
        # An engine for each format: what one keeps of prompts the others would read.
        for shape, memory in itertools.product(shape_names, memory_formats):
            engine = load(shapes(config)[shape])
            if engine.drafter is None:
                raise ValueError(f"{name}: an engine without a drafter cannot be evaluated")
            engine.drafter = timed = TimedDrafter(engine.drafter)
            if memory is not None:
                engine.drafter = SentMemory(timed, memory)
            for temperature in temperatures:
                case = Case(
                    name if memory is None else f"{name} ({memory} memory)",
                    shape,
                    "greedy" if temperature == 0 else f"temperature {temperature:g}",
                )
                yield case, list(_runs(engine, timed, prompts, temperature, max_tokens, seed, progress))


def _runs(
    engine: Engine,
    timed: TimedDrafter,
    prompts: Sequence[Prompt],
    temperature: float,
    max_tokens: int,
    seed: int,
    progress: Callable[[], None],
) -> Iterator[Run]:
    plain = SamplingParams(max_tokens, temperature=temperature, seed=seed, speculative=False)
    drafting = replace(plain, speculative=True)
    for params in (plain, drafting):
        decode(engine, prompts[0], params)  # the first run of anything pays for memory being set up
    for number, prompt in enumerate(prompts):
        runs: dict[bool, tuple[Decoded, float]] = {}
        for params in (plain, drafting) if number % 2 else (drafting, plain):
            runs[params.speculative] = _timed(engine, timed, prompt, params)
        yield Run(prompt.source, runs[True][0], runs[False][0], runs[True][1])
        progress()


def _timed(engine: Engine, timed: TimedDrafter, prompt: Prompt, params: SamplingParams) -> tuple[Decoded, float]:
    """A run, and the seconds that drafting took in its ``decode_seconds``."""
    before: list[float] = []
    run = decode(engine, prompt, params, on_first=lambda: before.append(timed.seconds))
    return run, timed.seconds - before[0]


def figures(runs: Sequence[Run], seed: int = 0) -> Figures:
    """Pool runs."""
    stats = [run.speculative.stats for run in runs if run.speculative.stats is not None]
    acceptance: Acceptance = summarize(stats)
    tokens = sum(len(run.speculative.token_ids) for run in runs)
    plain_step = sum(run.plain.decode_seconds for run in runs) / max(1, sum(run.plain.decode_tokens for run in runs))
    drafts = sum(s.num_drafts for s in stats) - len(stats)  # like decode_seconds, without the first
    low, high = _interval(stats, seed)
    return Figures(
        prompts=len(runs),
        tau=acceptance.tau,
        tau_low=low,
        tau_high=high,
        by_depth=acceptance.by_depth,
        tokens_per_second=tokens / sum(run.speculative.seconds for run in runs),
        decode_ratio=decode_ratio([run.speculative for run in runs], [run.plain for run in runs]),
        end_to_end=statistics.median(_rate(run.speculative) / _rate(run.plain) for run in runs),
        passes_per_token=acceptance.target_passes / tokens,
        draft_cost=sum(run.draft_seconds for run in runs) / max(1, drafts) / plain_step,
        identical=sum(run.speculative.token_ids == run.plain.token_ids for run in runs) / len(runs),
    )


def _rate(run: Decoded) -> float:
    return len(run.token_ids) / run.seconds


def _interval(stats: Sequence[RequestStats], seed: int) -> tuple[float, float]:
    """95% of the τ of samples of the prompts, drawn with replacement."""
    rng, counts = random.Random(seed), [(s.num_accepted_draft_tokens, s.num_drafts) for s in stats]
    taus = []
    for _ in range(_RESAMPLES):
        accepted, drafts = map(sum, zip(*rng.choices(counts, k=len(counts)), strict=True))
        taus.append(1 + accepted / max(1, drafts))
    taus.sort()
    return taus[int(0.025 * _RESAMPLES)], taus[int(0.975 * _RESAMPLES)]


def by_source(runs: Sequence[Run]) -> dict[str, Figures]:
    """Figures of all runs, and of each source's."""
    sources = sorted({run.source for run in runs})
    return {ALL: figures(runs)} | {source: figures([run for run in runs if run.source == source]) for source in sources}


def to_json(results: dict[Case, dict[str, Figures]], settings: dict[str, Any]) -> str:
    """Everything but text."""
    source: Provenance = provenance()
    rows = [
        {"drafter": case.drafter, "shape": case.shape, "sampling": case.sampling, "source": name, **_rounded(each)}
        for case, sources in results.items()
        for name, each in sources.items()
    ]
    return json.dumps({"provenance": source.as_dict(), "settings": settings, "results": rows}, indent=1)


def _rounded(figures: Figures) -> dict[str, Any]:
    values = {name: getattr(figures, name) for name in figures.__dataclass_fields__}
    return {
        name: [round(share, 3) for share in value] if isinstance(value, tuple) else None if value != value else round(value, 3)
        for name, value in values.items()
    }
