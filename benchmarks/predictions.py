"""`moaserve bench predictions`: what knowing most of an answer beforehand saves."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.decoding import Decoded, decode
from benchmarks.interrupting import until_interrupted
from benchmarks.prompts import Prompt
from speculative.engine import Engine
from speculative.request import SamplingParams


@dataclass(frozen=True, slots=True)
class PredictionFigures:
    """Answers predicted but for ``edits`` places: decoding passes with and without, and how much faster each was."""

    edits: int
    prompts: int
    passes: int
    passes_without: int
    tokens: int
    speed: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}

    def line(self) -> str:
        """For people."""
        return (
            f"{self.edits} edits: {self.passes} passes where the drafter alone takes {self.passes_without} "
            f"({self.passes / max(1, self.passes_without):.2f}), {self.speed:.1f}x as fast in the median"
        )


def measure(
    engine: Engine, prompts: Sequence[Prompt], edits: Sequence[int], *, max_tokens: int, seed: int, progress: Callable[[], None]
) -> list[PredictionFigures]:
    """Each prompt is answered greedily to ``max_tokens``, without a prediction and with its answer edited as often as told.

    An interrupt ends it with the prompts that were done, where there are any.
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    pairs: dict[int, list[tuple[Decoded, Decoded]]] = {count: [] for count in edits}
    whole = 0
    with until_interrupted(lambda: whole):
        for number, prompt in enumerate(prompts):
            without = decode(engine, prompt, params)
            for count in edits:
                draw = random.Random(f"{seed} {number} {count}")
                prediction = edited(without.token_ids, count, draw, engine.info.vocab_size)
                pairs[count].append((decode(engine, prompt, params, prediction=prediction), without))
            whole += 1
            progress()
    return [_figures(count, pairs[count][:whole]) for count in edits]


def edited(answer: Sequence[int], edits: int, draw: random.Random, vocabulary: int) -> list[int]:
    """The text before ``edits`` of it: at so many places 1 to 6 tokens are others, missing, or too many."""
    tokens = list(answer)
    for place in sorted(draw.sample(range(len(tokens)), edits), reverse=True):
        size = draw.randint(1, 6)
        others = [draw.randrange(vocabulary) for _ in range(size)]
        match draw.choice(("other", "missing", "extra")):
            case "other":
                tokens[place : place + size] = others
            case "missing":
                del tokens[place : place + size]
            case _:
                tokens[place:place] = others
    return tokens


def _figures(edits: int, pairs: list[tuple[Decoded, Decoded]]) -> PredictionFigures:
    with_it, without = ([pair[side] for pair in pairs] for side in (0, 1))
    return PredictionFigures(
        edits,
        prompts=len(pairs),
        passes=sum(map(_passes, with_it)),
        passes_without=sum(map(_passes, without)),
        tokens=sum(len(one.token_ids) for one in with_it),
        speed=median(b.decode_seconds / a.decode_seconds for a, b in pairs),
    )


def _passes(one: Decoded) -> int:
    """Verifications; prompts are left out, and steps for which the policy drafts nothing."""
    assert one.stats is not None
    return one.stats.num_drafts
