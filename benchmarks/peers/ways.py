"""Which ways of decoding are compared, and what each says of a group of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.network.processes import Process
from benchmarks.prompts import Prompt

OURS, OURS_PLAIN = "ours", "ours-plain"
TRANSFORMERS, COMPILED = "transformers", "transformers-compiled"
LOOKUP, ASSISTED = "transformers-lookup", "transformers-assisted"
LLAMA, LLAMA_LOOKUP = "llama.cpp", "llama.cpp-lookup"

KINDS = {
    OURS: "our server as it is: drafter, adaptive policy",
    OURS_PLAIN: "our server, asked not to speculate",
    TRANSFORMERS: "transformers' generate",
    COMPILED: "generate with a static cache and a compiled forward",
    LOOKUP: "generate with prompt_lookup_num_tokens",
    ASSISTED: "generate with assistant_model: --independent",
    LLAMA: "the server of llama-cpp-python",
    LLAMA_LOOKUP: "the same with draft_model=prompt-lookup-decoding",
}
"""All kinds of ways, in the order in which they are shown."""

ASSISTANCE = (LOOKUP, ASSISTED)
"""The kinds in which transformers drafts."""

MODULES = {LLAMA: "llama_cpp", LLAMA_LOOKUP: "llama_cpp"}
"""What must be installed for a kind, beyond what we need ourselves."""

EXTRA = "pip install -c constraints.txt '.[peers]'"


class PeerError(Exception):
    """A way cannot be run; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One way that is asked for: ``lookup`` tokens are drafted at once where it looks drafts up in the text."""

    kind: str
    lookup: int | None = None

    @property
    def name(self) -> str:
        """As tables show it."""
        return self.kind if self.lookup is None else f"{self.kind} ({self.lookup})"


@dataclass(frozen=True, slots=True)
class Answered:
    """What a way wrote to a group of prompts that were asked at once, in their order.

    ``tokens`` without those that end texts; ``seconds`` from asking until all had their whole answer.
    """

    texts: tuple[str, ...]
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Of the whole group, prompts included."""
        return self.tokens / self.seconds


class Way(Protocol):
    """Something that answers prompts greedily, several at once where ``batches`` is true."""

    @property
    def name(self) -> str:
        """As tables show it."""

    @property
    def batches(self) -> bool:
        """Whether it can be asked several prompts at once."""

    @property
    def process(self) -> Process | None:
        """The server that answers, which others may share; None where none does."""

    async def answer(self, prompts: Sequence[Prompt]) -> Answered:
        """All answers; raises PeerError."""


def choose(
    asked: Sequence[str] | None,
    *,
    lookups: Sequence[int],
    independent: Path | None,
    installed: Callable[[str], bool],
) -> tuple[list[Spec], list[str]]:
    """The ways to run, ours first, and what is said of those left out.

    ``asked`` are kinds, None for all but ``transformers-compiled``. A kind whose package is missing is left out; raises PeerError
    for one that is unknown, or that is asked for by name and lacks its folder.
    """
    unknown = [kind for kind in asked or () if kind not in KINDS]
    if unknown:
        raise PeerError(f"--peer {unknown[0]}: unknown; use {', '.join(kind for kind in KINDS if kind != OURS)}")
    specs, notes = [], []
    for kind in KINDS:
        if kind != OURS and not (kind in asked if asked is not None else kind != COMPILED):
            continue
        if kind == ASSISTED and independent is None:
            if asked is not None:
                raise PeerError(f"--peer {kind} needs --independent FOLDER")
            notes.append(f"Left out: {kind} (give --independent FOLDER).")
        elif kind in MODULES and not installed(MODULES[kind]):
            notes.append(f"Left out: {kind}, as {MODULES[kind]} is not installed: {EXTRA}")
        elif kind in (LOOKUP, LLAMA_LOOKUP):
            specs += [Spec(kind, number) for number in dict.fromkeys(lookups)]
        else:
            specs.append(Spec(kind))
    return specs, notes
