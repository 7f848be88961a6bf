"""How results are printed: names and errors, which are not ours, as they are, and no figure cut short."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table


def console() -> Console:
    """Brackets are brackets to it, and colons colons."""
    return Console(markup=False, emoji=False)


def table(title: str | None, columns: Sequence[str], *, left: Collection[str] = ("",)) -> Table:
    """A table without rows. What is too long for its column is broken over lines; all but ``left`` columns are figures."""
    made = Table(title=title)
    for column in columns:
        made.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return made
