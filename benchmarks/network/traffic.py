"""What a link has carried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes from the edge's side up to the server and down from it, and packets that were lost.

    ``up`` and ``down`` are TCP's payload; the others count what was on the wire, with headers and what was sent again.
    """

    up: int = 0
    down: int = 0
    wire_up: int = 0
    wire_down: int = 0
    lost: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, name) - getattr(other, name) for name in self.__dataclass_fields__))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}
