"""What figures say: who was fastest over which link, and whether all texts were the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.network.figures import CrowdFigures, Figures, Key
from benchmarks.network.kinds import PLAIN


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which kind was fastest over a link at a temperature, by its median, and how far ahead of plain streaming."""

    link: str
    temperature: float
    by_speed: str
    speed_ratio: float
    by_first: str
    first_ratio: float

    def line(self) -> str:
        """For people."""
        how = "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"
        speed = "" if self.by_speed == PLAIN else f" ({self.speed_ratio:.2f}x {PLAIN})"
        first = "" if self.by_first == PLAIN else f" ({self.first_ratio:.2f}x the time of {PLAIN})"
        fastest, soonest = self.by_speed + speed, self.by_first + first
        return f"{self.link}, {how}: most tokens per second from {fastest}, first token soonest from {soonest}"


def verdicts(found: dict[Key, Figures]) -> list[Verdict]:
    """For each link and temperature."""
    told = []
    for link, temperature in dict.fromkeys(key[:2] for key in found):
        kinds = {key[2]: each for key, each in found.items() if key[:2] == (link, temperature)}
        fastest = max(kinds, key=lambda kind: kinds[kind].speed.median)
        soonest = min(kinds, key=lambda kind: kinds[kind].first.median)
        if (plain := kinds.get(PLAIN)) is None:  # all of its requests have failed
            continue
        ratios = kinds[fastest].speed.median / plain.speed.median, kinds[soonest].first.median / plain.first.median
        told.append(Verdict(link, temperature, fastest, ratios[0], soonest, ratios[1]))
    return told


def differing(found: Sequence[Figures | CrowdFigures]) -> tuple[int, int]:
    """Texts that were not plain streaming's, and all."""
    return sum(each.runs - each.same for each in found), sum(each.runs for each in found)
