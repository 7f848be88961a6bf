"""Networks to be emulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Link:
    """A network between two machines, the same both ways.

    ``rtt`` in seconds, ``rate`` in bits a second (None: no limit), ``loss`` the share of packets that get lost, 0 to 1.
    """

    name: str
    rtt: float = 0.0
    rate: float | None = None
    loss: float = 0.0

    @property
    def delay(self) -> float:
        """Seconds one way."""
        return self.rtt / 2

    @property
    def shaped(self) -> bool:
        """False where there is nothing to emulate."""
        return bool(self.rtt or self.rate or self.loss)

    def describe(self) -> str:
        """In words."""
        if not self.shaped:
            return f"{self.name}: not shaped"
        rate = "" if self.rate is None else f", {self.rate / 1e6:g} Mbit/s"
        return f"{self.name}: {self.rtt * 1e3:g} ms round trip{rate}" + (f", {self.loss:.1%} loss" if self.loss else "")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"name": self.name, "rtt_ms": self.rtt * 1e3, "rate_mbit": self.rate and self.rate / 1e6, "loss": self.loss}


LINKS: Final = {
    link.name: link
    for link in (
        Link("lan"),
        Link("5g", 0.020, 100e6),
        Link("4g", 0.060, 20e6, 0.005),
        Link("poor", 0.200, 2e6, 0.02),
    )
}
