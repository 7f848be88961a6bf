"""`moaserve bench offline`: plain against speculative decoding and transformers' generate, prompt by prompt in one run."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.acceptance import Acceptance, summarize
from benchmarks.decoding import Decoded, decode, decode_ratio, decode_with_transformers
from benchmarks.interrupting import until_interrupted
from benchmarks.machine import Provenance, decoding_settings, provenance
from benchmarks.prompts import Prompt
from speculative.config import EngineConfig
from speculative.engine import Engine
from speculative.request import RequestStats, SamplingParams

PLAIN, SPECULATIVE, TRANSFORMERS = "plain", "speculative", "transformers generate"


@dataclass(frozen=True, slots=True)
class OfflineResult:
    """A whole run: one list of timed outputs per way of decoding, in prompt order."""

    provenance: Provenance
    settings: dict[str, Any]
    prompts: Sequence[Prompt]
    runs: dict[str, list[Decoded]]

    def tokens_per_second(self, way: str) -> float:
        """All tokens over all time, prefill included."""
        return _speed(self.runs[way])

    @property
    def compared(self) -> list[list[int]]:
        """What ratios are of, as places in ``prompts``: each prompt, or where they are of conversations each conversation."""
        whole: dict[str, list[int]] = {}
        for place, prompt in enumerate(self.prompts):
            whole.setdefault(prompt.conversation or f"prompt {place}", []).append(place)
        return list(whole.values())

    def ratios(self, way: str, over: str) -> list[float]:
        """Speed of one way over another's, one by one (tokens per second, so different lengths do not mislead)."""
        ours, theirs = self.runs[way], self.runs[over]
        return [_speed([ours[place] for place in each]) / _speed([theirs[place] for place in each]) for each in self.compared]

    def decode_ratio(self, way: str, over: str) -> float:
        """Speed of one way over another's with prefill left out, all prompts together."""
        return decode_ratio(self.runs[way], self.runs[over])

    def identical(self, way: str, over: str) -> int:
        """Prompts for which both ways gave the same tokens."""
        return sum(a.token_ids == b.token_ids for a, b in zip(self.runs[way], self.runs[over], strict=True))

    def acceptance(self) -> Acceptance:
        """Of the speculative runs."""
        return summarize([run.stats for run in self.runs[SPECULATIVE] if run.stats is not None])

    def tau_by_source(self) -> dict[str, float]:
        """τ for each source of prompts."""
        by_source: dict[str, list[RequestStats]] = {}
        for prompt, run in zip(self.prompts, self.runs[SPECULATIVE], strict=True):
            if run.stats is not None:
                by_source.setdefault(prompt.source, []).append(run.stats)
        return {source: summarize(stats).tau for source, stats in sorted(by_source.items())}

    def ratios_by_source(self, way: str, over: str) -> dict[str, list[float]]:
        """As ``ratios``, for each source of prompts; a conversation's is that of its first."""
        by_source: dict[str, list[float]] = {}
        for each, ratio in zip(self.compared, self.ratios(way, over), strict=True):
            by_source.setdefault(self.prompts[each[0]].source, []).append(ratio)
        return dict(sorted(by_source.items()))

    def ratios_of_ended(self, way: str, over: str) -> list[float]:
        """As ``ratios``, of those whose answers by both ways all ended by themselves: others are cut off, or repeat themselves."""
        most = self.settings["max_tokens"]
        ratios = zip(self.compared, self.ratios(way, over), strict=True)
        runs = (self.runs[way], self.runs[over])
        return [ratio for places, ratio in ratios if all(len(run[place].token_ids) < most for run in runs for place in places)]

    def to_json(self) -> str:
        """Figures, settings and provenance; no text."""
        acceptance, decoding = self.acceptance(), self.decode_ratio(SPECULATIVE, PLAIN)
        return json.dumps(
            {
                "provenance": self.provenance.as_dict(),
                "settings": self.settings,
                "prompts": len(self.prompts),
                "compared": len(self.compared),
                "tokens_per_second": {way: round(self.tokens_per_second(way), 1) for way in self.runs},
                "decode_ratio": None if math.isnan(decoding) else round(decoding, 3),
                "ratios": {name: spread(self.ratios(*pair)) for name, pair in self._comparisons().items()},
                "ratios_by_source": {
                    name: {source: spread(ratios) for source, ratios in self.ratios_by_source(*pair).items()}
                    for name, pair in self._comparisons().items()
                },
                "ratios_of_ended": {
                    name: {"compared": len(ended), **spread(ended)}
                    for name, pair in self._comparisons().items()
                    if (ended := self.ratios_of_ended(*pair))
                },
                "identical_outputs": {name: self.identical(*pair) for name, pair in self._comparisons().items()},
                "tau": round(acceptance.tau, 3),
                "tau_by_source": {source: round(tau, 3) for source, tau in self.tau_by_source().items()},
                "acceptance_by_depth": [round(share, 3) for share in acceptance.by_depth],
                "target_passes": acceptance.target_passes,
                "draft_tokens": acceptance.drafted,
                "accepted_draft_tokens": acceptance.accepted,
            },
            indent=2,
        )

    def _comparisons(self) -> dict[str, tuple[str, str]]:
        pairs = {"speculative/plain": (SPECULATIVE, PLAIN)}
        if TRANSFORMERS in self.runs:
            pairs["plain/transformers"] = (PLAIN, TRANSFORMERS)
            pairs["speculative/transformers"] = (SPECULATIVE, TRANSFORMERS)
        return pairs


def _speed(runs: Sequence[Decoded]) -> float:
    return sum(len(run.token_ids) for run in runs) / sum(run.seconds for run in runs)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, which lie among the values however few there are."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return {"median": round(median, 3), "p25": round(low, 3), "p75": round(high, 3)}


def run_offline(
    engine: Engine,
    config: EngineConfig,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    reference: Any | None,
    progress: Callable[[], None] = lambda: None,
) -> OfflineResult:
    """Decode every prompt greedily in every way, the ways taking turns so that drifts of the machine's speed hit all alike.

    Where the engine has a prefix cache each way finds in it what it has read of the same conversation, and nothing else.
    ``reference`` is a transformers model with the same weights, or None to leave it out. An interrupt ends it with the prompts that
    all ways have decoded, where there are any.
    """

    def ours(way: str, *, speculative: bool) -> Callable[[Prompt], Decoded]:
        params = SamplingParams(max_tokens, temperature=0.0, speculative=speculative)
        return lambda prompt: decode(engine, prompt, params, salt=f"{way}, {prompt.conversation}")

    ways = {PLAIN: ours(PLAIN, speculative=False), SPECULATIVE: ours(SPECULATIVE, speculative=True)}
    if reference is not None:
        ways[TRANSFORMERS] = lambda prompt: decode_with_transformers(reference, prompt, max_tokens)
    for way in ways.values():
        way(replace(prompts[0], conversation="before"))  # the first run of anything pays for memory and primitives being set up
    runs: dict[str, list[Decoded]] = {name: [] for name in ways}
    whole = 0
    with until_interrupted(lambda: whole):
        for index, prompt in enumerate(prompts):
            order = list(ways)
            for name in order[index % len(order) :] + order[: index % len(order)]:
                runs[name].append(ways[name](prompt))
            whole += 1
            progress()
    settings = {
        **decoding_settings(config),
        "drafter": engine.info.drafter,
        "dtype": engine.info.dtype,
        "compiled": bool(engine.target.compiled),
        "max_tokens": max_tokens,
    }
    return OfflineResult(provenance(), settings, prompts[:whole], {name: each[:whole] for name, each in runs.items()})
