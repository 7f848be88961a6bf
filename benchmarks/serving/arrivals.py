"""When requests come, what they ask and how long their answers may be: all drawn before anything is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

import msgspec
import numpy as np

from benchmarks.prompts import Prompt

MEDIAN_ANSWER: Final = 64
ANSWER_SIGMA: Final = 0.7
"""Lengths of answers that the prompts' file does not have: log-normal, their median and their logarithms' standard deviation."""

_GAPS, _PROMPTS, _LENGTHS = range(3)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to be sent ``at`` seconds after a load's beginning; one that only warms up does not count."""

    at: float
    prompt: int
    max_tokens: int
    seed: int
    counts: bool


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked at any rate, in any round.

    Answers end at the latest after as many tokens as the prompt's own answer has (``fixed_tokens``, where that is given), and after
    ``max_tokens``. Each rate lasts ``seconds``, and at least as long as ``fewest`` requests take to come; ``warm_up`` more
    come before those.
    """

    prompts: Sequence[Prompt]
    seconds: float
    fewest: int
    warm_up: int
    max_tokens: int
    fixed_tokens: int | None
    seed: int

    def requests(self, rate: float) -> int:
        """How many count in one round at ``rate`` requests a second."""
        return max(self.fewest, round(rate * self.seconds))

    def arrivals(self, rate: float, round: int) -> list[Arrival]:
        """A Poisson process of ``rate`` requests a second, in order of time.

        Of all such processes one that has just so many requests in its time, or a short load would be more or less than ``rate``:
        exponential gaps, and the one after the last request, over their sum. Every rate begins with the same questions, so that
        rates compare too; another round asks others.
        """
        count = self.warm_up + self.requests(rate)
        gaps = self._draws(round, _GAPS).exponential(size=count + 1)
        times = np.cumsum(gaps)[:-1] / gaps.sum() * (count / rate)
        chosen = self._shuffled(round, count)
        lengths = self.lengths(round, chosen)
        first = 1 + round * 1_000_003  # a round's requests sample otherwise than another's
        return [
            Arrival(float(at), prompt, length, self.seed + first + number, number >= self.warm_up)
            for number, (at, prompt, length) in enumerate(zip(times, chosen, lengths, strict=True))
        ]

    def lengths(self, round: int, chosen: Sequence[int]) -> list[int]:
        """Most tokens of each answer."""
        drawn = self._draws(round, _LENGTHS).lognormal(np.log(MEDIAN_ANSWER), ANSWER_SIGMA, len(chosen))
        known = [self.fixed_tokens or self.prompts[prompt].answer_tokens for prompt in chosen]
        return [min(self.max_tokens, max(1, told or int(other))) for told, other in zip(known, drawn, strict=True)]

    def digest(self, rates: Sequence[float], rounds: int) -> str:
        """Of everything that is sent: two measurements with the same have asked the same at the same times."""
        told = hashlib.sha256()
        for rate in rates:
            for round in range(rounds):
                for arrival in self.arrivals(rate, round):
                    told.update(msgspec.json.encode([asdict(arrival), self.prompts[arrival.prompt].token_ids]))
        return told.hexdigest()[:16]

    def _shuffled(self, round: int, count: int) -> list[int]:
        """Each prompt once before any comes again."""
        draws = self._draws(round, _PROMPTS)
        chosen: list[int] = []
        while len(chosen) < count:
            chosen += draws.permutation(len(self.prompts)).tolist()
        return chosen[:count]

    def _draws(self, round: int, purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, round, purpose])
