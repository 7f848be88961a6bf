"""What memory an engine takes, and how much of its caches fits a limit. Arithmetic only; ``memory_measuring`` finds the sizes."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from speculative.errors import EngineLoadError

logger = logging.getLogger("moaserve.engine")

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Bytes that an engine may take; whether fewer texts at once than were named will do, because nobody named a number.

    ``size`` is None where nobody named one either: what is free when the engine is loaded, which is no reason not to load it.
    """

    size: int | None
    lowers_num_seqs: bool = False


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes, before it is known how many texts there will be.

    ``process`` is what Python, PyTorch and the server take, ``weights`` and ``drafter_weights`` the networks, ``copies`` those of
    weights in another layout, ``working`` what a step takes while it runs, and ``working_sequence`` for each text of it besides;
    ``sequence`` and ``drafter_sequence`` are those of keys and values of one text of full length, and ``kept_token`` those of a
    token in the prefix cache.
    """

    process: int
    weights: int
    drafter_weights: int
    copies: int
    working: int
    working_sequence: int
    sequence: int
    drafter_sequence: int
    kept_token: int

    @property
    def each(self) -> int:
        """What one text more takes."""
        return self.working_sequence + self.sequence + self.drafter_sequence

    def plan(self, num_seqs: int, kept_tokens: int) -> MemoryPlan:
        """With so many texts at once, and so many tokens kept."""
        return MemoryPlan(self, num_seqs, kept_tokens)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What an engine of so many texts takes that keeps so many tokens."""

    needs: MemoryNeeds
    num_seqs: int
    kept_tokens: int

    @property
    def parts(self) -> Mapping[str, int]:
        """Bytes by what they are for."""
        needs = self.needs
        return {
            "process": needs.process,
            "weights": needs.weights,
            "drafter_weights": needs.drafter_weights,
            "weight_copies": needs.copies,
            "working": needs.working + self.num_seqs * needs.working_sequence,
            "kv_cache": self.num_seqs * needs.sequence,
            "drafter_cache": self.num_seqs * needs.drafter_sequence,
            "prefix_cache": self.kept_tokens * needs.kept_token,
        }

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.parts.values())

    def describe(self) -> str:
        """In words."""
        told = ", ".join(f"{name.replace('_', ' ')} {shown(size)}" for name, size in self.parts.items())
        return f"{shown(self.total)} in full use by {self.num_seqs} texts at once and {self.kept_tokens} kept tokens: {told}"

    def within(self, size: int, *, lowers_num_seqs: bool, keeps_tokens: bool) -> MemoryPlan:
        """The same or less: fewer tokens kept, unless ``keeps_tokens``, then fewer texts, if so wanted; raises EngineLoadError."""
        plan = self._lowered(size, lowers_num_seqs=lowers_num_seqs, keeps_tokens=keeps_tokens)
        if plan.total > size:
            raise EngineLoadError(self._refusal(size, keeps_tokens))
        return plan

    def beside(self, free: int, *, keeps_tokens: bool) -> MemoryPlan:
        """The same where nobody named a limit: one text, even where that is more than what is ``free``."""
        return self._lowered(free, lowers_num_seqs=True, keeps_tokens=keeps_tokens)

    def _lowered(self, size: int, *, lowers_num_seqs: bool, keeps_tokens: bool) -> MemoryPlan:
        if self.total <= size:
            return self
        plan = self if keeps_tokens else self._keeping_less(size)
        if plan.total > size and lowers_num_seqs:
            excess = plan.total - size
            plan = replace(plan, num_seqs=max(1, plan.num_seqs - -(-excess // self.needs.each)))
        return plan if keeps_tokens else replace(plan, kept_tokens=self.kept_tokens)._keeping_less(size)

    def _keeping_less(self, size: int) -> MemoryPlan:
        most = (size - replace(self, kept_tokens=0).total) // max(1, self.needs.kept_token)
        return replace(self, kept_tokens=min(self.kept_tokens, max(0, most)))

    def _refusal(self, size: int, keeps_tokens: bool) -> str:
        needs = self.needs
        kept = self.kept_tokens * needs.kept_token if keeps_tokens else 0
        fixed = needs.plan(0, 0).total
        said = (
            f"--memory-limit {shown(size)}: process, weights and working memory take {shown(fixed)}, each of "
            f"{self.num_seqs} texts of full length {shown(needs.each)}"
        )
        if kept:
            said += f", and --prefix-cache-tokens {self.kept_tokens} {shown(kept)}"
        fitting = max(0, size - fixed - kept) // needs.each
        return f"{said}; " + (
            f"at most {fitting} fit: lower --max-num-seqs to that, or lower --max-model-len"
            if fitting
            else f"not even one fits: lower --max-model-len, or allow {shown(fixed + kept + needs.each)} or more"
        )


def fitted(plan: MemoryPlan, limit: MemoryLimit, free: int | None, *, keeps_tokens: bool) -> MemoryPlan:
    """As much of ``plan`` as a limit allows, or where it has no size what is ``free``, if that is known; raises EngineLoadError."""
    if limit.size is not None:
        return plan.within(limit.size, lowers_num_seqs=limit.lowers_num_seqs, keeps_tokens=keeps_tokens)
    if free is None:
        return plan
    lowered = plan.beside(free, keeps_tokens=keeps_tokens)
    if lowered.num_seqs < plan.num_seqs:
        logger.warning(
            "%s of memory are free: %d texts at once instead of %d (--max-num-seqs, --max-model-len or --memory-limit choose)",
            shown(free),
            lowered.num_seqs,
            plan.num_seqs,
        )
    if lowered.total > free:
        logger.warning("one text of full length may need more, %s in all: lower --max-model-len", shown(lowered.total))
    return lowered


def parse_size(text: str) -> int:
    """Bytes of "2GiB", "1500MB" or "1000000"; raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError("it must be a size such as 2GiB, 1500MB or a number of bytes")
    return int(float(match[1]) * _UNITS[(match[2] or "").upper()])


def shown(size: int) -> str:
    """Bytes for people, in MiB or GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
