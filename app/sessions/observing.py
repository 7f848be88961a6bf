"""What stores tell of their work, to whoever counts it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

Operation = Literal["get", "put", "delete", "known"]
Outcome = Literal["hit", "miss", "ok", "error", "corrupt"]
Direction = Literal["read", "written"]


class StoreObserver(Protocol):
    """Is told what stores do, in the event loop's thread."""

    def ended(self, operation: Operation, outcome: Outcome) -> None:
        """An operation has ended; besides, each value that turned out to be corrupt counts as an operation ``corrupt``."""

    def took(self, operation: Operation, seconds: float) -> None:
        """How long an operation took; those that were not tried, because the store is known to be away, are left out."""

    def carried(self, direction: Direction, size: int) -> None:
        """Bytes of values were read or written."""

    def reachable(self, is_up: bool) -> None:
        """A store on another machine was found, or lost."""


class Unobserved:
    """Nobody counts."""

    def ended(self, operation: Operation, outcome: Outcome) -> None:
        """As in StoreObserver."""

    def took(self, operation: Operation, seconds: float) -> None:
        """As in StoreObserver."""

    def carried(self, direction: Direction, size: int) -> None:
        """As in StoreObserver."""

    def reachable(self, is_up: bool) -> None:
        """As in StoreObserver."""


class StoreUnavailableError(Exception):
    """A store has not done what it was asked; ``tried`` is False where it was not even asked, as it is known to be away."""

    def __init__(self, message: str, *, tried: bool) -> None:
        super().__init__(message)
        self.tried = tried


@dataclass(slots=True)
class Work:
    """How an operation comes out; error, unless somebody says better."""

    outcome: Outcome = "error"


@contextmanager
def observed(observer: StoreObserver, operation: Operation) -> Iterator[Work]:
    """Count and time an operation, and end it quietly where the store is away."""
    work, began, tried = Work(), time.perf_counter(), True
    try:
        yield work
    except StoreUnavailableError as error:
        work.outcome, tried = "error", error.tried
    finally:
        observer.ended(operation, work.outcome)
        if tried:
            observer.took(operation, time.perf_counter() - began)
