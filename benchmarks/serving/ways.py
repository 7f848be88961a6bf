"""How speculation is asked for, and the servers that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from benchmarks.network.processes import moaserve

OFF: Final = "off"
"""Plain decoding: what every other way is compared with."""

ServerName = Literal["adaptive", "chain", "tree", "bare"]


@dataclass(frozen=True, slots=True)
class Way:
    """A way of decoding: ``body`` asks a server for it."""

    name: str
    server: ServerName
    body: dict[str, Any] = field(default_factory=dict)


WAYS: Final = {
    way.name: way
    for way in (
        Way(OFF, "adaptive", {"speculative": False}),
        Way("chain", "chain"),
        Way("tree", "tree"),
        Way("adaptive", "adaptive"),
        Way("bare", "bare"),
    )
}
"""``bare`` is plain decoding by a server that has no drafter at all."""


@dataclass(frozen=True, slots=True)
class Own:
    """Servers of ours: ``options`` are of all of them, ``draft_options`` of those that draft trees, ``chain`` a chain's length."""

    options: Sequence[str]
    draft_options: Sequence[str]
    chain: int

    def command(self, server: ServerName) -> list[str]:
        """A server that reads each prompt anew, however often it comes."""
        drafting = {
            "adaptive": [*self.draft_options, "--draft-policy", "adaptive"],
            "tree": [*self.draft_options, "--draft-policy", "fixed"],
            "chain": ["--draft-policy", "fixed", "--draft-breadth", "1", *self._lengths()],
            "bare": ["--drafter", "none"],
        }
        options = ["--host", "127.0.0.1", "--port", "0", "--no-playground", "--prefix-cache-tokens", "0", *self.options]
        return moaserve("serve", *options, *drafting[server])

    def _lengths(self) -> list[str]:
        # A chain is not cut short: it is as long at every step, as the paper's is.
        return ["--draft-depth", str(self.chain), "--draft-nodes", str(self.chain), "--draft-min-reach", "0"]
